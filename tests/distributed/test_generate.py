"""The generate command under torchrun prints once, like a single process, and reports an error in one line."""

import json
from pathlib import Path

import pytest

from tests.command_line.command_runs import REPOSITORY, Finished, run_process
from tests.distributed import generate_cases
from tests.distributed.rank_process import has_devices
from tests.distributed.world import Worlds, free_port, is_rank

GRAPHS = "--inference-dynamic-batching-num-cuda-graphs"
starts_ranks = pytest.mark.skipif(is_rank(), reason="starts torchrun itself")

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
    device = ["--device", "cuda", GRAPHS, 2] if has_devices(2) else ["--device", "cpu"]
    return ["--prompts", prompts, "--output-path", output, *device, "--num-speculative-tokens", "2"]


def run_ranks(prompts: Path, count: int, *flags: object) -> Finished:
    (prompts.parent / "out.json").unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", count, "--master-port", free_port()]
    script = REPOSITORY / "examples" / "generate.py"
    return run_process(*launcher, script, *_flags(prompts), *flags, cwd=prompts.parent)


@pytest.mark.long
@starts_ranks
@pytest.mark.parametrize("flags", [("--tensor-model-parallel-size", 2), ()], ids=["shared", "replicas"])
def test_output_is_written_by_only_one_rank(flags: tuple, prompts: Path, by_one_process: list[dict]) -> None:
    done = run_ranks(prompts, 2, *flags)
    assert done.status == 0, done.stderr
    document = json.loads((prompts.parent / "out.json").read_text())
    reported = ("request_id", "prompt_tokens", "generated_tokens", "text", "error")
    assert [[request.get(name) for name in reported] for request in document["requests"]] == [
        [request.get(name) for name in reported] for request in by_one_process
    ]
    assert document["summary"]["requests"] == len(LINES) and document["summary"]["failed_requests"] == 1
    assert done.stdout.count("skipped ") - done.stdout.count("nothing was skipped") <= 2
    assert done.stdout.count("request  prompt tokens") == 1


def test_error_found_by_one_process_ends_all_processes(worlds: Worlds) -> None:
    errors = worlds.of(2).run(generate_cases.error_of_one_process)
    assert errors == ["this process cannot"] * 2


@pytest.mark.parametrize(("kind", "size"), [("expert", 2), ("tensor", 3)])
def test_random_model_that_ranks_cannot_split_is_refused_in_one_line(worlds: Worlds, kind: str, size: int) -> None:
    for error in worlds.of(size).run(generate_cases.error_of_the_random_model, kind):
        assert error.startswith("--random-model: ") and f"--{kind}-model-parallel-size" in error
