"""Format the report on a run: replies, a table of requests, a summary, and prefill saved by the cache."""

from collections.abc import Iterator, Sequence

from ..config import CacheConfig
from .prompts import PromptLine
from .results import RequestRecord, RunResult

_MAX_REPLIES = 6
_PROMPT_LINES = 3
_REPLY_LINES = 12
_WIDTH = 110
_MAX_ROWS = 50
_PROMPT_EXCERPT = 44
_REPLY_EXCERPT = 16
_HEADER = ("request", "prompt tokens", "cached", "generated", "first token", "tokens/s")


def comparison_lines(cached: RunResult, uncached: RunResult) -> Iterator[str]:
    """Yield the lines of a table that compares a run with the cache to a run without it."""
    rows = (
        ("", "with cache", "without"),
        ("prompt tokens computed", str(cached.computed_tokens), str(uncached.computed_tokens)),
        (
            "mean time to first token",
            f"{cached.mean_time_to_first_token_s:.3f} s",
            f"{uncached.mean_time_to_first_token_s:.3f} s",
        ),
        ("whole run", f"{cached.seconds:.2f} s", f"{uncached.seconds:.2f} s"),
    )
    for name, ours, theirs in rows:
        yield f"{name:<24}  {ours:>10}  {theirs:>10}"


def reply_lines(lines: Sequence[PromptLine], records: Sequence[RequestRecord], prompts: Sequence[str]) -> Iterator[str]:
    """Yield lines with the end of each prompt, marked "|", and its reply, marked ">", as printable ASCII.

    If a prompt ends in the middle of a line, the reply continues that line.

    Args:
        records, prompts: Record and prompt text of each line, in the same order.
    """
    last_turns = {line.session: index for index, line in enumerate(lines)}
    is_shown = [line.session is None or last_turns[line.session] == index for index, line in enumerate(lines)]
    shown = [index for index, shows in enumerate(is_shown) if shows][:_MAX_REPLIES]
    for index in shown:
        record = records[index]
        yield f"request {record.request_id}" + ("" if record.error is None else f" failed: {record.error}")
        if record.error is None:
            yield from _continued(prompts[index], record.text)
    if len(shown) < len(lines):
        yield f"... and {len(lines) - len(shown)} more; --output-path writes them all"


def text_lines(records: Sequence[RequestRecord], prompts: Sequence[str]) -> Iterator[str]:
    """Yield one line per request, with the end of its prompt and the start of its reply."""
    for record, prompt in list(zip(records, prompts, strict=True))[:_MAX_ROWS]:
        end = "..." * (len(prompt) > _PROMPT_EXCERPT) + ascii(prompt[-_PROMPT_EXCERPT:])
        start = ascii(record.text[:_REPLY_EXCERPT]) + "..." * (len(record.text) > _REPLY_EXCERPT)
        yield f"{record.request_id:>4}  {end} -> {start if record.error is None else f'error: {record.error}'}"
    yield from _rest_line(records)


def table_lines(records: Sequence[RequestRecord]) -> Iterator[str]:
    """Yield the lines of a table with one row per request."""
    rows = [_HEADER, *(_cells(record) for record in records[:_MAX_ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield from _rest_line(records)


def summary_line(result: RunResult) -> str:
    """Return a line with the number of prompt tokens that the cache saved and the generation speed."""
    counters = result.cache.counters
    share = 100 * result.cached_tokens / result.prompt_tokens if result.prompt_tokens else 0.0
    found = {"the host": result.cached_tokens_from_host, "the disk": result.cached_tokens_from_disk}
    tiers = " and ".join(f"{count} from {tier}" for tier, count in found.items() if count)
    return (
        f"skipped {result.cached_tokens} of {result.prompt_tokens} prompt tokens "
        f"({share:.1f} %{f'; {tiers}' if tiers else ''}), published "
        f"{counters.states_published} states and restored {counters.states_restored}; generated "
        f"{result.generated_tokens} tokens in {result.seconds:.2f} s ({result.tokens_per_second:.0f} tokens/s)"
    )


def compilation_line(result: RunResult) -> str:
    """Return a line with the number of Triton compilations in this process and the time that they took."""
    count, seconds = result.cache.num_compiled_kernels, result.cache.compile_seconds
    return f"compiled {count} kernel{'s' * (count != 1)} in {seconds:.1f} s"


def graphs_line(result: RunResult) -> str:
    """Return a line with the number of captured CUDA graphs and the number of steps that replayed a graph."""
    cache, counters = result.cache, result.cache.counters
    return (
        f"captured {cache.num_graphs} step shape{'s' * (cache.num_graphs != 1)} in {cache.capture_seconds:.1f} s, "
        f"{cache.graph_bytes / 2**30:.2f} GiB; {counters.graph_steps} of {counters.steps} steps replayed one"
    )


def drafts_line(result: RunResult) -> str:
    """Return a line with the acceptance rates of draft tokens, overall and by position in the draft."""
    counters = result.cache.counters
    if not counters.draft_tokens:
        return f"nothing was drafted in {counters.decode_rows} decode steps of requests"
    shares = ", ".join(f"{100 * share:.0f}" for share in counters.acceptance_at)
    unlisted = f"; {counters.unlisted_tokens} rejected for tokens outside the short list" * bool(
        counters.unlisted_tokens
    )
    return (
        f"accepted {counters.accepted_tokens} of {counters.draft_tokens} drafts ({100 * counters.acceptance_rate:.1f} "
        f"%; by position {shares} %): {counters.tokens_per_decode_row:.2f} tokens a decode step of a request{unlisted}"
    )


def reason_for_no_skip(result: RunResult, config: CacheConfig) -> str | None:
    """Return the likely reason why no prompt token came from the cache; None if some did."""
    counters, block = result.cache.counters, config.block_size_tokens
    if result.cached_tokens:
        return None
    if not result.completed:
        return "no request ran"
    if not config.prefix_caching:
        return "prefix caching is off (--no-prefix-caching)"
    if max(len(record.prompt_tokens) for record in result.completed) <= block:
        return f"no prompt is longer than a block of {block} tokens; lower --inference-dynamic-batching-block-size"
    if len(result.completed) == 1:
        return "a single request has no earlier one to share a prefix with"
    if counters.states_skipped_no_room or counters.states_evicted:
        return (
            f"states did not fit ({counters.states_skipped_no_room} not stored, {counters.states_evicted} "
            "evicted); raise --inference-dynamic-batching-prefix-caching-mamba-gb"
        )
    if counters.prompt_tokens_matched:
        return "prompts share a prefix, but no state was cached at its end; the next such request will find one"
    return f"no prompt begins with the same {block} tokens as an earlier one"


def _cells(record: RequestRecord) -> tuple[str, ...]:
    first = record.time_to_first_token_s
    rate = len(record.generated_tokens) / record.latency_s if record.latency_s else 0.0
    return (
        str(record.request_id),
        str(len(record.prompt_tokens)),
        str(record.cached_tokens),
        "failed" if record.error is not None else str(len(record.generated_tokens)),
        "-" if first is None else f"{first:.3f} s",
        "-" if first is None else f"{rate:.1f}",
    )


def _rest_line(records: Sequence[RequestRecord]) -> Iterator[str]:
    if len(records) > _MAX_ROWS:
        yield f"... and {len(records) - _MAX_ROWS} more; --output-path writes them all"


def _continued(prompt: str, reply: str) -> Iterator[str]:
    *before, unfinished = prompt.split("\n")
    first, *rest = (unfinished + reply).split("\n")
    if first == unfinished and rest:  # the reply starts on a new line
        before.append(first)
    else:
        rest.insert(0, first)
    yield from (f"  | {_printable(line)}" for line in before[-_PROMPT_LINES:])
    yield from (f"  > {_printable(line)}" for line in rest[:_REPLY_LINES])
    if len(rest) > _REPLY_LINES:
        yield f"  > ... {len(rest) - _REPLY_LINES} lines more"


def _printable(line: str) -> str:
    """Return a line with all characters but printable ASCII escaped, shortened if it is long."""
    shown = "".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in line.expandtabs(4))
    return shown if len(shown) <= _WIDTH else f"{shown[:_WIDTH]}..."
