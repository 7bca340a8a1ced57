"""The generate command over files of prompts, in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.command_line import generation
from megatron_mamba_cache.command_line.results import Difference
from megatron_mamba_cache.mcore.engine import MambaCacheEngine
from tests.command_line.command_runs import Finished, run_here

PREFIX = "The gate at the lower lock is shut from dusk, and the keeper lives in the white house beside it. " * 2
CODE = (
    "import unittest\n\n\nclass Test(unittest.TestCase):\n\n"
    + "    def test(self):\n        self.assertEqual(1, 1)\n\n" * 4
)
SHIPPED = ()  # flags that choose the model that ships
NUM_TOKENS = 4

Generate = Callable[..., dict[str, Any]]


@pytest.fixture
def run_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Return a function that runs prompt lines with flags and writes the results to `output.json`."""

    def run(lines: list[dict[str, object]], *flags: object, model: tuple[str, ...] = ("--random-model",)) -> Finished:
        file = tmp_path / "lines.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = ("--prompts", file, "--output-path", tmp_path / "output.json")
        return run_here(capsys, *model, *files, "--num-tokens-to-generate", NUM_TOKENS, *flags)

    return run


@pytest.fixture
def generate(run_lines: Callable[..., Finished], tmp_path: Path) -> Generate:
    """Return a function that runs prompt lines with flags, checks for status 0, and returns the written results."""

    def run(lines: list[dict[str, object]], *flags: object, **model: tuple[str, ...]) -> dict[str, Any]:
        finished = run_lines(lines, *flags, **model)
        assert finished.status == 0, finished.stderr
        return json.loads((tmp_path / "output.json").read_text())

    return run


def test_output_file_has_documented_keys_and_consistent_sums(generate: Generate) -> None:
    document = generate([{"prompt": PREFIX + "a"}, {"prompt_tokens": [1, 2, 3], "num_tokens_to_generate": 2}])
    text, tokens = document["requests"]
    assert list(text) == [
        "request_id",
        "prompt_tokens",
        "generated_tokens",
        "text",
        "cached_tokens",
        "draft_tokens",
        "accepted_tokens",
        "time_to_first_token_s",
        "latency_s",
    ]
    assert text["prompt_tokens"] == list((PREFIX + "a").encode()) and tokens["prompt_tokens"] == [1, 2, 3]
    assert text["text"] == bytes(text["generated_tokens"]).decode(errors="replace")
    assert [len(request["generated_tokens"]) for request in (text, tokens)] == [NUM_TOKENS, 2]
    assert [request["request_id"] for request in (text, tokens)] == [0, 1]
    assert all(0 < request["time_to_first_token_s"] <= request["latency_s"] for request in (text, tokens))
    summary = document["summary"]
    assert summary["prompt_tokens"] == len(PREFIX) + 4 == summary["cached_tokens"] + summary["computed_tokens"]
    assert summary["generated_tokens"] == NUM_TOKENS + 2 and summary["steps"] >= NUM_TOKENS
    assert summary["tokens_per_second"] > 0
    assert set(summary["state_slots"]) >= {"free", "live", "cached"} and summary["state_slots"]["live"] == 0
    assert summary["kv_blocks"]["in_use"] == 0 and summary["kv_blocks"]["cached"] > 0


def test_later_turn_reuses_the_cached_earlier_turn(generate: Generate) -> None:
    document = generate([{"prompt": PREFIX, "session": "s"}, {"prompt": PREFIX + "and more", "session": "s"}])
    first, second = document["requests"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == len(PREFIX) // 64 * 64
    assert document["summary"]["cached_tokens"] == second["cached_tokens"]
    assert document["summary"]["prompt_tokens_skipped"] == second["cached_tokens"]


def test_turn_is_submitted_after_the_previous_one_finishes(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished_at_add: dict[int, set[int]] = {}
    add_request = MambaCacheEngine.add_request

    def note_and_add(engine: MambaCacheEngine, request_id: int, *args: Any, **settings: Any) -> Any:
        unfinished_at_add[request_id] = set(engine.requests)
        return add_request(engine, request_id, *args, **settings)

    monkeypatch.setattr(MambaCacheEngine, "add_request", note_and_add)
    sessions: list[str | int | None] = ["a", 1, "a", None, 1, "a"]
    generate([{"prompt": "x"} if name is None else {"prompt": "x", "session": name} for name in sessions])
    assert list(unfinished_at_add)[:3] == [0, 1, 3]  # the others do not wait
    for request_id, unfinished in unfinished_at_add.items():
        if sessions[request_id] is not None:
            assert not any(sessions[other] == sessions[request_id] for other in unfinished)


UNFIT = {
    "empty": ({"prompt": ""}, "empty"),
    "empty_tokens": ({"prompt_tokens": []}, "empty"),
    "unknown_token": ({"prompt_tokens": [5, 256]}, "token 256"),
    "negative_token": ({"prompt_tokens": [-1]}, "token -1"),
    "huge_token": ({"prompt_tokens": [2**70]}, f"token {2**70}"),
    "too_long": ({"prompt": "x" * 9000}, "max_sequence_length"),
    "too_much": ({"prompt": "x", "num_tokens_to_generate": 10**30}, "max_sequence_length"),
}


def test_invalid_prompt_does_not_fail_other_lines(generate: Generate) -> None:
    good = {"prompt": PREFIX}
    lines = [good, *({**line, "session": 1} for line, _ in UNFIT.values()), {**good, "session": 1}]
    document = generate(lines)
    first, *failed, last = document["requests"]
    for record, (_, message) in zip(failed, UNFIT.values(), strict=True):
        assert message in record["error"]
        assert record["generated_tokens"] == [] and record["text"] == "" and record["cached_tokens"] == 0
    assert "error" not in first and "error" not in last
    assert first["generated_tokens"] == last["generated_tokens"]
    assert document["summary"]["failed_requests"] == len(UNFIT)


def test_run_with_only_invalid_prompts_finishes(run_lines: Callable[..., Finished]) -> None:
    finished = run_lines([{"prompt": ""}, {"prompt_tokens": [300]}])
    assert finished.status == 0 and "nothing was skipped: no request ran" in finished.stdout


def test_sampling_depends_on_the_seed_not_on_cache_or_batch(generate: Generate) -> None:
    lines = [{"prompt": PREFIX, "num_tokens_to_generate": 12}, {"prompt": PREFIX + "b", "num_tokens_to_generate": 12}]
    flags = ("--top-k", 0, "--temperature", 2)

    def tokens(document: dict[str, Any]) -> list[list[int]]:
        return [request["generated_tokens"] for request in document["requests"]]

    base = tokens(generate(lines, *flags))
    assert tokens(generate([{**line, "session": 1} for line in lines], *flags)) == base
    assert tokens(generate(lines, *flags, "--no-prefix-caching")) == base
    assert tokens(generate(lines, *flags, "--seed", 1)) != base


def test_generate_runs_in_bf16_and_with_another_block_size(generate: Generate) -> None:
    lines = [{"prompt": PREFIX, "session": 1}, {"prompt": PREFIX + "b", "session": 1}]
    document = generate(lines, "--dtype", "bf16", "--inference-dynamic-batching-block-size", 128)
    assert document["summary"]["dtype"] == "bf16" and document["requests"][1]["cached_tokens"] == 128


def test_drafts_do_not_change_tokens_and_are_counted_per_request(generate: Generate) -> None:
    lines = [{"prompt": CODE, "num_tokens_to_generate": 24}, {"prompt": CODE[5:], "num_tokens_to_generate": 9}]
    plain = generate(lines, model=SHIPPED)
    document = generate(lines, "--num-speculative-tokens", 4, "--drafter", "prompt-lookup", model=SHIPPED)
    requests, summary = document["requests"], document["summary"]
    for with_drafts, without in zip(requests, plain["requests"], strict=True):
        assert with_drafts["generated_tokens"] == without["generated_tokens"]
        assert without["draft_tokens"] == without["accepted_tokens"] == 0
    drafted = sum(request["draft_tokens"] for request in requests)
    accepted = sum(request["accepted_tokens"] for request in requests)
    assert 0 < drafted == summary["draft_tokens"] == sum(summary["drafts_at"])
    assert accepted == summary["accepted_tokens"] == sum(summary["accepted_at"])
    assert summary["acceptance_rate"] == accepted / drafted
    assert len(summary["acceptance_at"]) == len(summary["drafts_at"]) <= 4
    assert summary["decode_rows"] + accepted == 24 + 9 - 2, "each request's first token is its prefill's"
    assert summary["tokens_per_decode_row"] == (24 + 9 - 2) / summary["decode_rows"]
    assert plain["summary"]["tokens_per_decode_row"] == 1 and plain["summary"]["acceptance_rate"] == 0


def test_report_mentions_drafts_if_there_are_any(run_lines: Callable[..., Finished]) -> None:
    lines = [{"prompt": CODE, "num_tokens_to_generate": 12}]
    finished = run_lines(lines, "--num-speculative-tokens", 4, model=SHIPPED)
    assert " drafts (" in finished.stdout and " tokens a decode step of a request" in finished.stdout
    assert "draft" not in run_lines([{"prompt": PREFIX}]).stdout
    idle = run_lines([{"prompt": PREFIX, "num_tokens_to_generate": 1}], "--num-speculative-tokens", 4)
    assert "nothing was drafted in 0 decode steps" in idle.stdout


def test_comparison_run_disables_drafts_and_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []
    engine_for = generation.engine_for

    def note_and_build(model: Any, config: CacheConfig, *rest: Any) -> MambaCacheEngine:
        asked.append((config.num_speculative_tokens, config.prefix_caching))
        return engine_for(model, config, *rest)

    monkeypatch.setattr(generation, "engine_for", note_and_build)
    output = tmp_path / "out.json"
    flags = ("--random-model", "--num-tokens-to-generate", 2, "--num-speculative-tokens", 2, "--output-path", output)
    finished = run_here(capsys, *flags)
    assert finished.status == 0 and "with cache and drafts, and with neither" in finished.stdout
    summary = json.loads(output.read_text())["summary"]
    assert summary["outputs_identical"] is True and summary["without_cache"]["cached_tokens"] == 0
    warming_up, compared, reported = asked
    assert (warming_up, compared, reported) == ((2, True), (0, False), (2, True))


def test_generate_reports_why_no_prompt_tokens_were_cached(run_lines: Callable[..., Finished]) -> None:
    finished = run_lines([{"prompt": PREFIX}], "--no-prefix-caching")
    assert "skipped 0 of" in finished.stdout and "nothing was skipped: prefix caching is off" in finished.stdout
    assert finished.stderr.count("WARNING") == 1 and "UserWarning" not in finished.stderr


def test_note_names_flags_that_greedy_decoding_ignores(run_lines: Callable[..., Finished]) -> None:
    assert "--top-k 1 is greedy" in run_lines([{"prompt": "x"}], "--temperature", 0.7).stderr
    assert run_lines([{"prompt": "x"}]).stderr == ""


def test_different_outputs_exit_with_status_1_and_name_the_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "first_difference", lambda *_: Difference(3, 1, 7, 8))
    flags = ("--random-model", "--num-tokens-to-generate", 1)
    finished = run_here(capsys, *flags)
    assert finished.status == 1
    assert "request 3 is the first that differs" in finished.stderr and "identical" not in finished.stdout
    assert run_here(capsys, *flags, "--dtype", "bf16").status == 0


def test_engine_is_warmed_up_before_its_first_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    add_request, warmup = MambaCacheEngine.add_request, MambaCacheEngine.warmup
    monkeypatch.setattr(MambaCacheEngine, "warmup", lambda self: calls.append("warmup") or warmup(self))
    monkeypatch.setattr(
        MambaCacheEngine, "add_request", lambda self, *a, **s: calls.append("add") or add_request(self, *a, **s)
    )
    finished = run_here(capsys, "--random-model", "--num-tokens-to-generate", 1)
    assert finished.status == 0
    engines = "".join("w" if call == "warmup" else "a" for call in calls)
    assert engines[0] == "w" and engines.count("w") == 3 and "ww" not in engines
