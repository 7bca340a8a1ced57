"""The printed report, for given results of a run."""

from dataclasses import replace

import pytest

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.command_line.prompts import PromptLine
from megatron_mamba_cache.command_line.report import (
    compilation_line,
    graphs_line,
    reason_for_no_skip,
    reply_lines,
    table_lines,
    text_lines,
)
from megatron_mamba_cache.command_line.results import Difference, LaterTurns, RequestRecord, RunResult, first_difference
from megatron_mamba_cache.metrics import CacheCounters, CacheSnapshot

CONFIG = CacheConfig(block_size_tokens=64)
LONG = RequestRecord(0, [1] * 100, [7, 8, 9], latency_s=1.0, time_to_first_token_s=0.5)


def result_of(*records: RequestRecord, states_evicted: int = 0, **counters: int) -> RunResult:
    numbered = [replace(record, request_id=number) for number, record in enumerate(records)]
    return RunResult(numbered, CacheSnapshot(CacheCounters(states_evicted=states_evicted, **counters)), 2.0)


def test_report_explains_why_no_prompt_tokens_were_cached() -> None:
    short, failed, hit = (
        replace(LONG, prompt_tokens=[1] * 64),
        replace(LONG, error="why"),
        replace(LONG, cached_tokens=64),
    )
    cases = [
        (result_of(LONG, hit), None),
        (result_of(failed), "no request ran"),
        (result_of(short, short, failed), "longer than a block of 64"),
        (result_of(LONG), "single request"),
        (result_of(LONG, LONG, states_skipped_no_room=2), "raise --inference-dynamic-batching-prefix-caching-mamba-gb"),
        (result_of(LONG, LONG, states_evicted=1), "raise --inference-dynamic-batching-prefix-caching-mamba-gb"),
        (result_of(LONG, LONG, prompt_tokens_matched=64), "no state was cached"),
        (result_of(LONG, LONG), "no prompt begins with the same 64 tokens"),
    ]
    for result, words in cases:
        reason = reason_for_no_skip(result, CONFIG)
        assert reason is None if words is None else reason is not None and words in reason
    off = reason_for_no_skip(result_of(LONG, LONG), replace(CONFIG, prefix_caching=False))
    assert off is not None and "--no-prefix-caching" in off


@pytest.mark.parametrize(("count", "words"), [(1, "1 kernel in 2.5 s"), (12, "12 kernels in 2.5 s")])
def test_kernel_compilations_are_reported_and_written_to_the_output_file(count: int, words: str) -> None:
    result = result_of(LONG)
    compiled = replace(result, cache=replace(result.cache, num_compiled_kernels=count, compile_seconds=2.51))
    assert compilation_line(compiled) == f"compiled {words}"
    summary = compiled.summary()
    assert (summary["num_compiled_kernels"], summary["compile_seconds"]) == (count, 2.51)


def test_captured_graphs_are_reported_and_written_to_the_output_file() -> None:
    result = result_of(LONG)
    counters = replace(result.cache.counters, steps=40, graph_steps=31)
    cache = replace(result.cache, counters=counters, num_graphs=12, capture_seconds=3.04, graph_bytes=3 * 2**29)
    captured = replace(result, cache=cache)
    assert graphs_line(captured) == "captured 12 step shapes in 3.0 s, 1.50 GiB; 31 of 40 steps replayed one"
    summary = captured.summary()
    assert (summary["num_graphs"], summary["graph_bytes"], summary["graph_steps"]) == (12, 3 * 2**29, 31)


def test_failed_request_counts_only_as_failed() -> None:
    summary = result_of(LONG, replace(LONG, error="why", generated_tokens=[])).summary()
    assert (summary["requests"], summary["failed_requests"]) == (2, 1)
    assert (summary["prompt_tokens"], summary["generated_tokens"], summary["tokens_per_second"]) == (100, 3, 1.5)


@pytest.mark.parametrize("text", ["a\nb\rc\x1b[31m", "\ud83d\u2028\u202e", "x" * 1000, ""])
def test_any_text_prints_as_one_ascii_line(text: str) -> None:
    (line,) = text_lines([replace(LONG, text=text)], [text])
    assert line.isascii() and line.isprintable() and len(line) < 300


def test_long_table_is_truncated_with_a_note() -> None:
    lines = list(table_lines([LONG] * 60))
    assert len(lines) == 52 and "10 more" in lines[-1]


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [([7, 8, 9], None), ([7, 5, 9], Difference(1, 1, 8, 5)), ([7, 8], Difference(1, 2, 9, None))],
)
def test_first_differing_token_of_two_runs_is_found(theirs: list[int], expected: Difference | None) -> None:
    cached = result_of(LONG, LONG, LONG)
    uncached = result_of(LONG, replace(LONG, generated_tokens=theirs), replace(LONG, generated_tokens=theirs))
    assert first_difference(cached, uncached) == expected


def test_only_turns_after_the_first_of_a_session_count_as_later() -> None:
    sessions = ["a", None, "a", "b", "a", None]
    lines = [PromptLine(number, "", session=session) for number, session in enumerate(sessions)]
    records = [replace(LONG, cached_tokens=number) for number in range(6)]
    assert LaterTurns.of(lines, records) == LaterTurns(prompt_tokens=200, cached_tokens=2 + 4)
    records[4].error = "why"
    assert LaterTurns.of(lines, records) == LaterTurns(prompt_tokens=100, cached_tokens=2)
    assert "skipped 2 of 100 prompt tokens (2.0 %)" in str(LaterTurns(100, 2))


def reply_to(prompt: str, text: str, **changes: object) -> list[str]:
    return list(reply_lines([PromptLine(0, prompt)], [replace(LONG, text=text, **changes)], [prompt]))


def test_printed_reply_continues_the_last_line_of_its_prompt() -> None:
    assert reply_to("a\nb\nc\nd\ne", "f\n\ng") == ["request 0", "  | b", "  | c", "  | d", "  > ef", "  > ", "  > g"]
    assert reply_to("a\n", "b") == ["request 0", "  | a", "  > b"]
    assert reply_to("a\nb", "\nc") == ["request 0", "  | a", "  | b", "  > c"]
    assert reply_to("a", "") == ["request 0", "  > a"]
    assert reply_to("a", "b", error="why") == ["request 0 failed: why"]


def test_long_replies_are_cut_and_control_characters_escaped() -> None:
    shown = reply_to("", "\n".join(["\x1b[31m\r\u202e\t" + "x" * 1000] * 50))
    assert len(shown) < 20 and "38 lines more" in shown[-1]
    assert all(line.isascii() and line.isprintable() and len(line) < 150 for line in shown)


def test_last_reply_of_a_session_is_shown() -> None:
    sessions = ["a", "b", "a", None, "b"]
    lines = [PromptLine(number, "", session=session) for number, session in enumerate(sessions)]
    records = [replace(LONG, request_id=number) for number in range(5)]
    shown = list(reply_lines(lines, records, [""] * 5))
    assert [line for line in shown if line.startswith("request")] == ["request 2", "request 3", "request 4"]
    assert "2 more" in shown[-1]
