"""Flags on the command line override environment variables, which override the file of --config."""

import os
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.flag_sources import VLLM_FLAGS, variable_of
from megatron_mamba_cache.command_line.main import main
from tests.command_line.command_runs import run_process

KINDS: dict[str, tuple[str, Any, tuple[list[str], str, str], tuple[Any, Any, Any]]] = {
    "a number": ("port", 5000, (["--port", "1"], "2", "3"), (1, 2, 3)),
    "a number by its short name": (
        "max-model-len",
        None,
        (["--inference-max-seq-length", "64"], "65", "66"),
        (64, 65, 66),
    ),
    "a choice that YAML reads as false": ("access-log", "text", (["--access-log", "json"], "off", "off"), None),
    "text that looks like a number": ("api-key-file", None, (["--api-key-file", "01"], "02", "03"), ("01", "02", "03")),
    "a flag that may be repeated": (
        "cors-origin",
        [],
        (["--cors-origin", "http://a", "--cors-origin", "http://b"], "http://c http://d", "[http://e, http://f]"),
        (["http://a", "http://b"], ["http://c", "http://d"], ["http://e", "http://f"]),
    ),
    "a list": (
        "served-model-name",
        None,
        (["--served-model-name", "a", "b"], "['c', 'd, e']", "\n  - f\n  - g h"),
        (["a", "b"], ["c", "d, e"], ["f", "g h"]),
    ),
    "a boolean": ("prefix-caching", None, (["--prefix-caching"], "false", "no"), (True, False, False)),
    "a boolean by its negation": ("no-adaptive-drafts", None, (["--adaptive-drafts"], "TRUE", "on"), None),
    "a switch": ("insecure-coordinator", False, (["--insecure-coordinator"], "1", "yes"), (True, True, True)),
    "a switch that the environment turns off": ("random-model", False, ([], "0", "true"), None),
}
EXPECTED = {
    "a choice that YAML reads as false": ("json", "off", "off"),
    "a boolean by its negation": (True, False, False),
    "a switch that the environment turns off": (False, False, True),
}
DEST = {"max-model-len": "inference_max_seq_length", "no-adaptive-drafts": "adaptive_drafts"}


def served(*flags: str) -> Namespace:
    parsed: Namespace = command_parser().parse_args(["serve", *flags])
    return parsed


@pytest.mark.parametrize("kind", KINDS)
def test_command_line_overrides_environment_overrides_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, default, (words, variable, line), values = KINDS[kind]
    on_command_line, in_environment, in_file = values or EXPECTED[kind]
    path = tmp_path / "serve.yaml"
    path.write_text(f"# settings\n{name}: {line}\n")
    before = dict(os.environ)
    for has_words, has_variable, has_file in product((False, True), repeat=3):
        with monkeypatch.context() as patched:
            if has_variable:
                patched.setenv(variable_of(name), variable)
            flags = [*(["--config", str(path)] if has_file else []), *(words if has_words else [])]
            found = getattr(served(*flags), DEST.get(name, name.replace("-", "_")))
        expected = on_command_line if has_words and words else in_environment if has_variable else None
        expected = (in_file if has_file else default) if expected is None else expected
        assert found == expected, (has_words, has_variable, has_file)
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["max_model_len", "max-model-len", "--max-model-len", "inference-max-seq-length"])
def test_config_key_may_be_any_long_name_with_dashes_or_underscores(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f'"{name}": 77\nhf-model:\nload: ~\n')
    arguments = served("--config", str(path))
    assert (arguments.inference_max_seq_length, arguments.hf_model, arguments.load) == (77, None, None)


def test_nonempty_variable_for_any_alias_sets_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBA_CACHE_KV_GB", "2.5")
    monkeypatch.setenv("MAMBA_CACHE_MODEL", "a")
    monkeypatch.setenv("MAMBA_CACHE_PORT", "")
    arguments = served()
    assert arguments.inference_dynamic_batching_buffer_size_gb == 2.5
    assert arguments.hf_model == "a" and arguments.port == 5000


def test_flag_overrides_a_conflicting_flag_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAMBA_CACHE_HF_MODEL", "a")
    assert served("--load", "b").load == "b" and served("--load", "b").hf_model is None
    assert served("c").hf_model == "c"
    path = tmp_path / "a.yaml"
    path.write_text("load: d\n")
    assert served("--config", str(path)).load is None


def test_environment_variable_gives_the_config_file_of_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    monkeypatch.setenv("MAMBA_CACHE_CONFIG", str(path))
    for words in (["serve"], ["generate"], ["doctor"], ["plan", "--trace", "x"]):
        path.write_text("log-level: error\n")
        assert command_parser().parse_args(words).log_level == "error"
        path.write_text("")
        assert command_parser().parse_args(words).log_level == "warning"


def test_kubernetes_service_variables_do_not_set_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "PORT": "tcp://10.0.0.1:5000",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "5000",
        "PORT_5000_TCP": "tcp://10.0.0.1:5000",
        "PORT_5000_TCP_PORT": "5000",
    }.items():
        monkeypatch.setenv(f"MAMBA_CACHE_{name}", value)
    assert served().port == 5000
    assert main(["generate", "--top-p", "7"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


BAD_FILES = [
    ("prot: 1", "line 1: unknown key 'prot': did you mean port?"),
    ("port: 1\nmax_seq_len: 9", "line 2: unknown key 'max_seq_len': did you mean max-model-len?"),
    ("zzz: 1", "line 1: unknown key 'zzz'\n"),
    ("config: other.yaml", "line 1: unknown key 'config'"),
    ("\n\nport: many", "line 3 (port): --port: invalid int value: 'many'"),
    ("port: 70000", "line 1 (port): --port is 70000; it must be between 0"),
    ("block-size: 0", "line 1 (block-size): --block-size: block_size_tokens is 0"),
    ("access-log: loud", "line 1 (access-log): --access-log: invalid choice: 'loud'"),
    ("prefix-caching: maybe", "line 1 (prefix-caching) is 'maybe'; it must be true or false"),
    ("port: [1, 2]", "line 1 (port): --port takes one value, found a list of 2"),
    ("port: {a: 1}", "line 1: port must be a value or a list of values, found a mapping"),
    ("api-key: [a, [b]]", "line 1: api-key must be a value or a list of values, found a sequence"),
    ("served-model-name: [a, --port]", "line 1 (served-model-name): '--port' is a flag"),
    ("port: 1\nblock-size: 64\nblock_size: 32", "line 3 (block_size) and "),
    ("- port", "the file must have lines of the form FLAG: VALUE, found a sequence"),
    ("port", "the file must have lines of the form FLAG: VALUE, found a scalar"),
    ("port: 1\n  host: b", "line 2 is not valid YAML: mapping values are not allowed here"),
    ("a: &x [*x", " is not valid YAML: "),
    ("host: " + 2000 * "[" + 2000 * "]", " is nested too deeply"),
    ("? [a, b]\n: 1", "line 1: a key must be a flag, found a sequence"),
    ("gpu_memory_utilization: 0.5", "line 1: unknown key 'gpu_memory_utilization': use --memory-fraction"),
    ("port: 1\ntensor-parallel-size: 2", "line 2: unknown key 'tensor-parallel-size': use torchrun"),
    ("drain-seconds: 0", "line 1 (drain-seconds): --drain-seconds: drain_s is 0.0; it must be a positive"),
    ("max-choices: 0", "line 1 (max-choices): --max-choices: max_choices is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_error_in_a_config_file_is_reported_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}" in error and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~"])
def test_empty_config_file_sets_no_flags(text: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert served("--config", str(path)).set_flags == ()


def test_second_config_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\n")
    for words in (["--config", str(path)], [f"--config={path}"]):
        assert main(["serve", *words, "--config", str(path)]) == 2
        assert capsys.readouterr().err == (
            "mamba-cache: error: --config is given more than once; merge the files into one\n"
        )


@pytest.mark.parametrize(("name", "reason"), [("none.yaml", "No such file"), ("", "Is a directory"), ("b", "decode")])
def test_error_names_an_unreadable_config_file(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").write_bytes(b"port: \xff")
    path = tmp_path / name
    assert main(["plan", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"--config {path} cannot be read: " in error and reason in error and error.count("\n") == 1


BAD_VARIABLES = [
    ("PORT", "many", "MAMBA_CACHE_PORT: --port: invalid int value: 'many'"),
    ("PORT", "70000", "MAMBA_CACHE_PORT: --port is 70000; it must be between 0"),
    ("CORS_ORIGIN", "[a, {b: c}]", "MAMBA_CACHE_CORS_ORIGIN is '[a, {b: c}]'; it must be words, or a list"),
    ("NO_PREFIX_CACHING", "2", "MAMBA_CACHE_NO_PREFIX_CACHING is '2'; it must be true or false"),
    ("CONFIG", "none.yaml", "--config none.yaml cannot be read: No such file"),
    ("MAX_QUEUED_REQUESTS", "-1", "MAMBA_CACHE_MAX_QUEUED_REQUESTS: --max-queued-requests: max_queued is -1"),
    ("MAX_BODY_MB", "0", "MAMBA_CACHE_MAX_BODY_MB: --max-body-mb: max_body_bytes is 0; it must be at least 1024"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VARIABLES)
def test_error_in_an_environment_variable_is_reported_in_one_line(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"MAMBA_CACHE_{name}", value)
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_two_variables_for_one_flag_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAMBA_CACHE_MODEL", "a")
    monkeypatch.setenv("MAMBA_CACHE_HF_MODEL", "b")
    assert main(["serve"]) == 2
    assert "MAMBA_CACHE_MODEL and MAMBA_CACHE_HF_MODEL set the same flag" in capsys.readouterr().err


def test_errors_do_not_name_an_overridden_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 80000\n")
    monkeypatch.setenv("MAMBA_CACHE_PORT", "90000")
    assert main(["serve", "--config", str(path), "--port", "70000"]) == 2
    assert capsys.readouterr().err.startswith("mamba-cache: error: --port is 70000;")
    assert main(["serve", "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith("mamba-cache: error: MAMBA_CACHE_PORT: --port is 90000;")


def test_only_misspelled_mamba_cache_variables_are_reported(tmp_path: Path) -> None:
    code = (
        "import os; names = ('BLOCKSIZE', 'MAX_NUM_SEQS', 'PROMPTS', 'XYZ')\n"
        "os.environ |= {f'MAMBA_CACHE_{name}': '1' for name in names}\n"
        "from megatron_mamba_cache.command_line.main import main; raise SystemExit(main(['plan', '--trace', 'none']))"
    )
    finished = run_process("-c", code, cwd=tmp_path)
    assert finished.status == 2
    note, of_vllm, error = finished.stderr.splitlines()
    assert note == "note: MAMBA_CACHE_BLOCKSIZE sets no flag: did you mean MAMBA_CACHE_BLOCK_SIZE?"
    assert of_vllm == "note: MAMBA_CACHE_MAX_NUM_SEQS sets no flag: use --max-running-requests"
    assert error.startswith("mamba-cache: error: --kv-bytes-per-token is missing")


UNKNOWN_FLAGS = [
    (["serve", "--max-seq-len", "5"], "unknown flag --max-seq-len: did you mean --max-model-len?"),
    (["serve", "--max-model-length=5"], "unknown flag --max-model-length: did you mean --max-model-len?"),
    (["generate", "--temp", "1"], "unknown flag --temp: did you mean --temperature?"),
    (["plan", "--trace", "x", "--cachegb", "1"], "unknown flag --cachegb: did you mean --cache-gb?"),
    (["serve", "--zzz"], "unknown flag --zzz; mamba-cache serve --help lists all of them"),
    (["serve", "--gpu-memory-utilization", "0.9"], "unknown flag --gpu-memory-utilization: use --memory-fraction"),
    (["serve", "--tensor-parallel-size=2"], "unknown flag --tensor-parallel-size: use torchrun --nproc-per-node N"),
    (["serve", "--tensor_parallel_size", "2"], "unknown flag --tensor_parallel_size: use torchrun"),
    (["serve", "--served-model-name", "a", "--", "b"], "unrecognized arguments: -- b"),
    (["serve", "--enable-prefix-caching"], "unknown flag --enable-prefix-caching: prefixes are cached by default"),
]


@pytest.mark.parametrize(("words", "message"), UNKNOWN_FLAGS)
def test_error_for_an_unknown_flag_suggests_a_similar_flag(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_vllm_flags_with_advice_are_not_flags_of_serve() -> None:
    for flag in VLLM_FLAGS:
        with pytest.raises(Exception, match=f"unknown flag {flag}: "):
            served(flag)


@pytest.mark.parametrize("words", [["--model", "a"], ["--hf-model", "a"], ["a"], ["a", "--port", "1"]])
def test_serve_takes_its_model_by_flag_or_as_first_argument(words: list[str]) -> None:
    assert served(*words).hf_model == "a"


def test_error_names_the_typed_alias_of_a_model_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "no-folder"]) == 2
    assert "error: --model: no-folder is not a directory" in capsys.readouterr().err
