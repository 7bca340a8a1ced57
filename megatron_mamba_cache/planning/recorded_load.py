"""Read recorded workloads: the arrival times, lengths and shared prefixes of requests, without their texts.

Two file formats are supported. Both have one JSON object per line and may be gzipped. In both, a hash identifies the
content of a fixed number of consecutive tokens.

- Agent sessions, one per line: `block_size` (tokens per hash) and `requests`, each with `t` (seconds since the start of
  the session), `in` and `out` (numbers of tokens) and `hash_ids`, local to the session. An entry that contains
  `requests` is a sub-agent, whose times are relative to its own `t`.
- Mooncake traces, one request per line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` for 512 tokens
  each, shared by all requests. `serve --record-load` writes two more fields: `block_size`, the number of tokens per
  hash if it is not 512, and `session`, the number of the conversation that the request continues.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

SESSIONS_START_WITHIN_S = 1800.0
"""Period in seconds over which the starts of sessions are spread evenly, because their start times are unknown."""
_MOONCAKE_TOKENS = 512
_MOST_TOKENS = 2**24

ContentId = tuple[int, int]
"""Identifier of the content of consecutive tokens: (session, hash); session is 0 if all requests share the hashes."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request in a recorded workload.

    Args:
        arrival_s: Arrival time in seconds since the start of the workload.
        session: Number of the session; if the file records no sessions, every request is a separate session.
        content: Content ids of the prompt, one per `tokens_per_id` tokens; the last may cover fewer tokens.
        agent: Number of the agent that sent the request: 0 for the session's main agent, others for sub-agents.
    """

    arrival_s: float
    session: int
    prompt_len: int
    reply_len: int
    content: tuple[ContentId, ...]
    agent: int = 0


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Recorded workload: requests in order of arrival, whose content ids each cover `tokens_per_id` tokens."""

    tokens_per_id: int
    requests: tuple[RecordedRequest, ...]


def read_load(path: Path, most_sessions: int | None = None, skip_sessions: int = 0) -> RecordedLoad:
    """Read a recorded workload from a file.

    Args:
        most_sessions: Maximum number of lines to read; None: all.
        skip_sessions: Number of lines to skip at the beginning of the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a line is in neither format, or the file has no requests; the message says where and why.
    """
    with _opened(path) as file:
        lines = [line for line in file if line.strip()]
    lines = lines[skip_sessions:][:most_sessions]
    if not lines:
        raise ValueError(f"{path} contains no requests")
    requests: list[RecordedRequest] = []
    sizes = set()
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            size, found = _requests_of(entry, number, SESSIONS_START_WITHIN_S * number / len(lines))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number + 1 + skip_sessions}: {_reason(error)}") from error
        requests += found
        sizes.add(size)
    if len(sizes) > 1:
        raise ValueError(
            f"the hashes in {path} cover different numbers of tokens, {sorted(sizes)}; put the lines of each "
            "number into a separate file"
        )
    if not requests:
        raise ValueError(f"{path} contains only sessions without requests")
    return RecordedLoad(sizes.pop(), tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _opened(path: Path) -> Any:
    encoding = "utf-8-sig"  # some editors write a byte-order mark
    return gzip.open(path, "rt", encoding=encoding) if path.suffix == ".gz" else path.open(encoding=encoding)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the JSON is nested too deeply"
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def _requests_of(entry: Any, number: int, start_s: float) -> tuple[int, list[RecordedRequest]]:
    """Parse one line; return its number of tokens per hash and its requests.

    Args:
        number: Index of the line, which identifies a session.
        start_s: Start time of the session, if the line is a session.
    """
    if not isinstance(entry, Mapping):
        raise TypeError(f"each line must be a JSON object, found {type(entry).__name__}")
    if "requests" in entry:
        size = _count(entry, "block_size", 1)
        return size, [
            replace(_request(request, arrival_s, number, number, ("in", "out"), size), agent=agent)
            for agent, arrival_s, request in _of_agents(entry["requests"], start_s, count())
        ]
    if "input_length" in entry:
        arrival_s = _number(entry, "timestamp") / 1000
        lengths = ("input_length", "output_length")
        size = _count({"block_size": _MOONCAKE_TOKENS, **entry}, "block_size", 1)
        session = _count({"session": number, **entry}, "session", 0, 2**63)
        return size, [_request(entry, arrival_s, session, 0, lengths, size)]
    raise ValueError(
        "a line must have the fields of a session (requests, block_size) or of a Mooncake trace (input_length)"
    )


def _of_agents(requests: Any, start_s: float, agents: Iterator[int]) -> Iterator[tuple[int, float, Mapping[str, Any]]]:
    """Yield (agent number, arrival time, request) for the requests of an agent and its sub-agents."""
    agent = next(agents)
    if not isinstance(requests, list) or not all(isinstance(request, Mapping) for request in requests):
        raise TypeError("requests must be a list of JSON objects")
    for request in requests:
        arrival_s = start_s + _number(request, "t")
        if "requests" in request:
            yield from _of_agents(request["requests"], arrival_s, agents)
        else:
            yield agent, arrival_s, request


def _request(
    entry: Mapping[str, Any], arrival_s: float, session: int, names: int, lengths: tuple[str, str], size: int
) -> RecordedRequest:
    prompt_len, reply_len = _count(entry, lengths[0], 1), _count(entry, lengths[1], 0)
    hashes = entry["hash_ids"]
    if not isinstance(hashes, list) or not all(type(content) is int for content in hashes):
        raise TypeError("hash_ids must be a list of integers")
    if len(hashes) < prompt_len // size:
        raise ValueError(
            f"a prompt of {prompt_len} tokens must have at least {prompt_len // size} hash_ids, one per {size} tokens, "
            f"found {len(hashes)}"
        )
    return RecordedRequest(arrival_s, session, prompt_len, reply_len, tuple((names, content) for content in hashes))


def _count(entry: Mapping[str, Any], name: str, least: int, limit: int = _MOST_TOKENS) -> int:
    value = entry[name]
    if type(value) is not int or not least <= value < limit:
        raise ValueError(f"{name} must be an integer of at least {least} and below {limit}, found {value!r}")
    return value


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry[name]
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite, non-negative number, found {value!r}")
    return float(value)
