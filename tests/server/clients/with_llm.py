"""Command `llm` with the server in extra-openai-models.yaml: prompts, streams, a continued conversation."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import GREEDY, MESSAGES, PROMPT, Served, check

served = Served.of_arguments()
MODELS = """\
- {{model_id: served, model_name: {model}, api_base: {url}/v1, api_key_name: served}}
- {{model_id: served-text, model_name: {model}, api_base: {url}/v1, api_key_name: served, completion: true}}
"""
OPTIONS = [word for name, value in GREEDY.items() for word in ("-o", name, str(value))]


def llm(*words: str) -> str:
    """Run the command; return its output."""
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    if done.returncode:
        sys.exit(f"llm {words}: {done.stderr}")
    return done.stdout.removesuffix("\n")


with tempfile.TemporaryDirectory() as home:
    environment = os.environ | {"LLM_USER_PATH": home}
    Path(home, "extra-openai-models.yaml").write_text(MODELS.format(model=served.model, url=served.url))
    llm("keys", "set", "served", "--value", served.key)
    chat = served.chat()
    check("a chat", llm("-m", "served", "--no-stream", *OPTIONS, PROMPT), chat)
    check("a streamed chat", llm("-m", "served", *OPTIONS, PROMPT), chat)
    check("an asynchronous chat", llm("-m", "served", "--async", *OPTIONS, PROMPT), chat)
    turns = [*MESSAGES, {"role": "assistant", "content": chat}, {"role": "user", "content": "\ndef g"}]
    check("the same conversation's next turn (-c)", llm("-c", *OPTIONS, "\ndef g"), served.chat(turns))
    (last,) = json.loads(llm("logs", "--json", "-n", "1"))
    check("its tokens in the log", last["output_tokens"], GREEDY["max_tokens"])
    check("a completion", llm("-m", "served-text", "--no-stream", *OPTIONS, PROMPT), served.text())
    check("a streamed completion", llm("-m", "served-text", *OPTIONS, PROMPT), served.text())
