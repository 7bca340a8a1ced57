"""Invalid flags give exit status 2 and a one-line error that names them."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megatron_mamba_cache.command_line.arguments import command_parser, with_sampling
from megatron_mamba_cache.command_line.cache_flags import FLAGS
from megatron_mamba_cache.command_line.commands import EDITING
from megatron_mamba_cache.command_line.main import main
from tests.command_line.command_runs import REPOSITORY, needs_installation, run_here, run_process

GRAPHS = "--inference-dynamic-batching-num-cuda-graphs"
BLOCK = "--inference-dynamic-batching-block-size"
KV = "--inference-dynamic-batching-buffer-size-gb"
EVICTION = "--inference-dynamic-batching-prefix-caching-eviction-policy"
DRAFTS = "--num-speculative-tokens"
WINDOWS = [DRAFTS, "4", "--draft-states", "window"]
STORED = "--cached-state-dtype"
STATES = "--inference-dynamic-batching-prefix-caching-mamba-gb"

BAD_FLAGS = [
    (["--hf-model", "no-folder"], "--hf-model: no-folder is not a directory"),
    (["--load", "no-folder"], "--load: cannot read no-folder"),
    (["--hf-model", "a", "--load", "b"], "--load: not allowed with argument --hf-model"),
    (["--load", "a", "--random-model"], "--random-model: not allowed with argument --load"),
    ([DRAFTS, "-1"], f"{DRAFTS}: num_speculative_tokens is -1; it must be an int from 0 to 8"),
    ([DRAFTS, "9"], f"{DRAFTS}: num_speculative_tokens is 9; it must be an int from 0 to 8"),
    ([DRAFTS, "8", BLOCK, "8"], f"{DRAFTS}: num_speculative_tokens is 8; it must be below block_size_tokens=8"),
    ([DRAFTS, "two"], DRAFTS),
    (
        ["--drafter", "prompt-lookup"],
        "--drafter prompt-lookup needs speculative decoding; set --num-speculative-tokens",
    ),
    (["--drafter", "draft-model", DRAFTS, "0"], "--drafter draft-model needs speculative decoding; set"),
    (["--draft-hf-model", "a"], "--draft-hf-model a needs speculative decoding; set --num-speculative-tokens"),
    (["--drafter", "oracle", DRAFTS, "2"], "--drafter: invalid choice: 'oracle' (choose from"),
    (["--drafter", "draft-model", DRAFTS, "2"], "--drafter draft-model needs a draft model; give its directory with"),
    (["--draft-hf-model", "a", DRAFTS, "2"], "--draft-hf-model a needs --drafter draft-model; add"),
    ([GRAPHS, "-4"], f"{GRAPHS}: num_cuda_graphs is -4"),
    ([GRAPHS, "513"], f"{GRAPHS}: num_cuda_graphs is 513; it must be an int from 0 to 512"),
    (["--num-tokens-to-generate", "0"], "--num-tokens-to-generate is 0"),
    (["--num-tokens-to-generate", "many"], "--num-tokens-to-generate"),
    (["--temperature", "-0.5"], "--temperature is -0.5"),
    (["--temperature", "nan"], "--temperature is nan"),
    (["--temperature", "inf"], "--temperature is inf"),
    (["--top-k", "-1"], "--top-k is -1"),
    (["--top-k", str(2**31)], "--top-k is 2147483648"),
    (["--top-p", "1.5"], "--top-p is 1.5"),
    (["--seed", "-1"], "--seed is -1"),
    ([EVICTION, "fifo"], f"{EVICTION}: invalid choice: 'fifo' (choose from"),
    ([STORED, "fp8"], f"{STORED}: invalid choice: 'fp8' (choose from"),
    (["--dtype", "fp8"], "--dtype"),
    (["--device", "tpu"], "--device"),
    (["--no-such-flag"], "--no-such-flag"),
    (["--temp", "1"], "--temp"),
    (["words"], "words"),
    ([BLOCK, "0"], f"{BLOCK}: block_size_tokens is 0"),
    ([KV, "0"], f"{KV}: buffer_size_gb is 0.0"),
    ([KV, "inf"], f"{KV}: buffer_size_gb is inf"),
    ([STATES, "-1"], f"{STATES}: prefix_caching_mamba_gb is -1.0"),
    ([STATES, "nan"], f"{STATES}: prefix_caching_mamba_gb is nan"),
    (["--prompts", "/no/such/file"], "--prompts /no/such/file cannot be read: No such file"),
    (["--prompts", "/"], "--prompts / cannot be read: Is a directory"),
    (["--output-path", "/no/such/folder/file"], "--output-path /no/such/folder/file cannot be written: No such file"),
    (["--output-path", "/"], "--output-path / cannot be written: Is a directory"),
]
BAD_FOR_THE_MODEL = [
    ([BLOCK, "100"], f"{BLOCK} to a multiple of it"),
    ([KV, "1e-9", STATES, "0"], "set --cache-gb to"),
    ([KV, "1e6"], "lower --cache-gb"),
    ([KV, "1e7"], "below 1048576"),
    ([*WINDOWS, KV, "1e-4", STATES, "1e-4"], "which cannot hold one request"),
    ([STORED, "int8", *WINDOWS, KV, "1e-4", STATES, "1e-4"], "states in addition to the live states of max_requests="),
    ([STORED, "int8", "--cache-gb", "1e-4"], "states in addition to the live states of max_requests="),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS + [(["--random-model", *f], m) for f, m in BAD_FOR_THE_MODEL])
def test_bad_flag_exits_with_a_one_line_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = run_here(capsys, *flags)
    assert finished.status == 2
    assert message in finished.stderr
    assert finished.stderr.count("\n") == 1, finished.stderr


@pytest.mark.parametrize("command", [[], ["sing"], ["doctor", "--fast"]])
def test_bad_command_exits_with_a_one_line_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bad_flag_in_a_subprocess_prints_no_traceback(tmp_path: Path) -> None:
    finished = run_process("-m", "megatron_mamba_cache", "generate", "--load", "x", cwd=tmp_path)
    assert finished.status == 2 and finished.stdout == ""
    assert finished.stderr.startswith("mamba-cache: error: --load: ") and finished.stderr.count("\n") == 1


def test_cuda_without_a_device_exits_with_a_one_line_error(tmp_path: Path) -> None:
    hide = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
    code = (
        hide + "from megatron_mamba_cache.command_line.main import main; exit(main(['generate', '--device', 'cuda']))"
    )
    finished = run_process("-c", code, cwd=tmp_path)
    assert finished.status == 2
    assert finished.stderr.count("\n") == 1 and "--device cuda" in finished.stderr


def test_help_and_bad_flags_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("{}\n")
    code = (
        "import sys; from megatron_mamba_cache.command_line.main import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert main(['generate', '--prompts', 'lines.jsonl']) == 2\n"
        "assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    )
    assert run_process("-c", code, cwd=tmp_path).status == 0


def test_failed_check_leaves_the_output_file_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for path in (old, new):
        assert run_here(capsys, "--random-model", "--output-path", path, BLOCK, 100).status == 2
    assert old.read_text() == "kept" and not new.exists()


def test_closed_stdout_prints_no_traceback(tmp_path: Path) -> None:
    code = "import sys; from megatron_mamba_cache.command_line.main import main; sys.exit(main(['doctor']))"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()


def test_missing_sampling_flags_default_to_greedy_when_one_is_given() -> None:
    def sampling(*flags: str) -> tuple[float, int, float]:
        parsed = with_sampling(command_parser().parse_args(["generate", *flags]), EDITING)
        return parsed.temperature, parsed.top_k, parsed.top_p

    assert sampling() == (EDITING["temperature"], EDITING["top_k"], EDITING["top_p"])
    assert sampling("--top-k", "0") == (1.0, 0, 0.0)
    assert sampling("--temperature", "0.5", "--top-p", "0.9") == (0.5, 1, 0.9)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--block-size", "0"], "--block-size: block_size_tokens is 0"),
        (["--kv-gb=nan"], "--kv-gb: buffer_size_gb is nan"),
        (["--state-gb", "-1"], "--state-gb: prefix_caching_mamba_gb is -1.0"),
        (["--cuda-graphs", "-4"], "--cuda-graphs: num_cuda_graphs is -4"),
        (["--max-model-len", "0"], "--max-model-len: max_sequence_length is 0"),
        (["--max-tokens-per-step", "0"], "--max-tokens-per-step: max_tokens is 0"),
        # Sizes that are not given come from the model: a message cites no default for them.
        (["--num-speculative-tokens", "9"], "num_speculative_tokens is 9; it must be an int from 0 to 8\n"),
        (["--block-size", "4", "--num-speculative-tokens", "4"], "below block_size_tokens=4\n"),
    ],
)
def test_error_names_the_flag_as_typed_and_its_value(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = run_here(capsys, *flags)
    assert finished.status == 2 and expected in finished.stderr and "--inference" not in finished.stderr


@pytest.mark.parametrize("command", ["generate", "plan"])  # plan names the flag in the other order
def test_error_names_a_flag_with_an_alias_only_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--model"]) == 2
    assert capsys.readouterr().err == "mamba-cache: error: --model: expected one argument\n"


def test_error_for_too_few_tokens_per_step_names_the_conflicting_limit(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_here(capsys, "--max-tokens-per-step", "8", "--random-model")
    assert finished.status == 2 and "max_tokens is 8; it must be at least max_requests=16" in finished.stderr


def test_short_flags_set_the_same_arguments_as_megatrons() -> None:
    parser = command_parser()
    for field, (flag, *aliases) in FLAGS.items():
        value = {"eviction": "lru", "decode_checkpoints": "all", "attention_backend": "reference"}.get(field, "7")
        for alias in aliases:
            assert parser.parse_args(["serve", alias, value]) == parser.parse_args(["serve", flag, value])


@needs_installation
def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_parser().parse_args(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"mamba-cache {version('megatron-mamba-cache')}\n"
