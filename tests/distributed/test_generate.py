"""The command under torchrun: one output, the same as one process writes, and one line for a mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line.command_runs import REPOSITORY, Finished, run_process
from tests.distributed.world import _free_port, is_rank

pytestmark = pytest.mark.skipif(is_rank(), reason="starts torchrun itself")

LINES = (
    {"prompt": "def add(a, b):\n    return", "session": "sums", "num_tokens_to_generate": 9},
    {"prompt": "class Point:\n    def __init__(self, x, y):\n" * 8, "num_tokens_to_generate": 12},
    {"prompt": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):", "session": "sums", "num_tokens_to_generate": 9},
    {"prompt": "class Point:\n    def __init__(self, x, y):\n" * 8 + "# end", "num_tokens_to_generate": 6},
    {"prompt_tokens": [1] * 40_000, "num_tokens_to_generate": 6},
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    return file


@pytest.fixture(scope="module")
def by_one_process(prompts: Path) -> list[dict]:
    done = run_process(REPOSITORY / "examples" / "generate.py", *_flags(prompts), cwd=prompts.parent)
    assert done.status == 0, done.stderr
    return json.loads((prompts.parent / "out.json").read_text())["requests"]


def _flags(prompts: Path) -> list[object]:
    output = prompts.parent / "out.json"
    return ["--prompts", prompts, "--output-path", output, "--device", "cpu", "--num-speculative-tokens", "2"]


def run_ranks(prompts: Path, count: int, *flags: object) -> Finished:
    (prompts.parent / "out.json").unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", count, "--master-port", _free_port()]
    script = REPOSITORY / "examples" / "generate.py"
    return run_process(*launcher, script, *_flags(prompts), *flags, cwd=prompts.parent)


@pytest.mark.parametrize(
    "flags", [("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2), ()], ids=["tp", "pp", "dp"]
)
def test_ranks_write_once_what_one_process_writes(flags: tuple, prompts: Path, by_one_process: list[dict]) -> None:
    done = run_ranks(prompts, 2, *flags)
    assert done.status == 0, done.stderr
    document = json.loads((prompts.parent / "out.json").read_text())
    told = ("request_id", "prompt_tokens", "generated_tokens", "text", "error")
    assert [[request.get(name) for name in told] for request in document["requests"]] == [
        [request.get(name) for name in told] for request in by_one_process
    ]
    assert document["summary"]["requests"] == len(LINES) and document["summary"]["failed_requests"] == 1
    assert done.stdout.count("skipped ") - done.stdout.count("nothing was skipped") <= 2
    assert done.stdout.count("request  prompt tokens") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tensor-model-parallel-size", 3), "needs a multiple of 3 processes, found 2"),
        (("--pipeline-model-parallel-size", 0), "must be at least 1"),
        (("--expert-model-parallel-size", 2), "the model has no experts"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line_of_the_first_process(flags: tuple, said: str, prompts: Path) -> None:
    done = run_ranks(prompts, 2, *flags)
    lines = [line for line in done.stderr.splitlines() if "megatron_mamba_cache: error:" in line]
    assert len(lines) == 1 and said in lines[0]
    assert "exitcode  : 2" in done.stderr


def test_sizes_without_a_launcher_say_how_to_start(prompts: Path) -> None:
    command = [sys.executable, REPOSITORY / "examples" / "generate.py", "--tensor-model-parallel-size", "2"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 2 and "start them with torchrun --nproc-per-node 2" in done.stderr
