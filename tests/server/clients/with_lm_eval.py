"""lm_eval on local tasks: generated text with both of its models for OpenAI-compatible servers, and log-likelihoods.

The last line of the output is JSON: for each question, its document and [log-likelihood, is_greedy] for each choice.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checking import GREEDY, PROMPT, STOP, Served, check

served = Served.of_arguments()
TEXTS = [PROMPT, "class Harbour:\n    boats = []\n", "import unittest\n\n\nclass Test", "def é(x):\n    return"]
QUESTIONS = [
    {"text": PROMPT, "choices": ["():\n    import sys", " ] ] ) zebra é"], "best": 0},
    {"text": "class Harbour:\n    def __init__(self", "choices": ["qqq qqq", "):\n", ", name):"], "best": 2},
    {"text": "for index in range", "choices": ["(10):", " while ("], "best": 0},
    {"text": "import os\n" * 40 + "import", "choices": [" os\n", " zebra"], "best": 0},
]
GENERATION = {
    "output_type": "generate_until",
    "doc_to_target": "",
    "generation_kwargs": {"until": [STOP], "max_gen_toks": GREEDY["max_tokens"], "temperature": GREEDY["temperature"]},
    "metric_list": [{"metric": "exact_match"}],
}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "best",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Write the files of a task and its documents; JSON is valid YAML."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    task = {"task": name, **source, "doc_to_text": "{{text}}", **settings}
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def run(folder: Path, tasks: list[str], model: str, *flags: str, path: str, **settings: Any) -> list[list[Any]]:
    """Run the tasks; return lm_eval's samples for each task."""
    arguments_of_model = {"base_url": served.url + path, "model": served.model, **settings}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--include_path", str(folder)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments_of_model.items()), *flags]
    out = folder / model
    environment = os.environ | {"OPENAI_API_KEY": served.key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    command += ["--tasks", ",".join(tasks), "--log_samples", "--output_path", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{command}: {done.stdout[-2000:]} {done.stderr[-4000:]}")
    return [_samples(out, task) for task in tasks]


def _samples(out: Path, task: str) -> list[dict[str, Any]]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


def texts_of(found: list[dict[str, Any]]) -> list[str]:
    return [sample["resps"][0][0] for sample in found]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_task(folder, "continue", [{"text": text} for text in TEXTS], GENERATION)
    write_task(folder, "choose", QUESTIONS, CHOICE)
    settings = {"path": "/v1/completions", "tokenizer": served.directory, "max_length": 2048}
    found, scored = run(folder, ["continue", "choose"], "local-completions", "--batch_size", "32", **settings)
    texts = [served.text(text, stop=[STOP]) for text in TEXTS]
    check("generate_until of local-completions", texts_of(found), texts)
    check("multiple_choice: the best choices", [sample["acc"] for sample in scored], [1.0] * len(QUESTIONS))

    settings = {"path": "/v1/chat/completions", "num_concurrent": 4}
    (found,) = run(folder, ["continue"], "local-chat-completions", "--apply_chat_template", **settings)
    texts = [served.chat([{"role": "user", "content": text}], stop=[STOP]) for text in TEXTS]
    check("generate_until of local-chat-completions", texts_of(found), texts)

print(json.dumps([[sample["doc"], [resps[0] for resps in sample["resps"]]] for sample in scored]))
