"""Recorded loads: times, lengths and shared prefixes of requests, without texts.

Two formats are read, one JSON object a line, gzipped or not. In both, a hash stands for the content of one run of
tokens, and equal hashes for equal content.

- Sessions of an agent, a line each: `block_size` (tokens a hash) and `requests`, each with `t` (seconds from the
  session's start), `in`, `out` (tokens) and `hash_ids`, local to the session. An entry with `requests` of its own is a
  sub-agent, whose times count from its own `t`.
- Mooncake's traces, a request a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512 tokens each,
  shared by all requests. `serve --record-load` writes two more fields: `block_size`, the tokens of a hash if they are
  not 512, and `session`, a number for the conversation that the request continues.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

SESSIONS_START_WITHIN_S = 1800.0
"""Period over which sessions without their own time start, evenly and in order."""
_MOONCAKE_TOKENS = 512
_MOST_TOKENS = 2**24

ContentId = tuple[int, int]
"""Content of a run of tokens: (session, hash)."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a recorded load.

    Args:
        arrival_s: From the start of the load.
        session: Number of its session; every request is one of its own where none is recorded.
        content: What each run of prompt tokens contains, the last one perhaps incomplete.
        agent: Which of the session's agents sent it: 0 for its own, another number for each sub-agent.
    """

    arrival_s: float
    session: int
    prompt_len: int
    reply_len: int
    content: tuple[ContentId, ...]
    agent: int = 0


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Requests in order of arrival; each content id stands for `tokens_per_id` tokens."""

    tokens_per_id: int
    requests: tuple[RecordedRequest, ...]


def read_load(path: Path, most_sessions: int | None = None, skip_sessions: int = 0) -> RecordedLoad:
    """Read a recorded load.

    Args:
        most_sessions, skip_sessions: Which lines are read; None: all.

    Raises:
        OSError: If the file cannot be read.
        ValueError: Naming the line that is in neither format.
    """
    with _opened(path) as file:
        lines = [line for line in file if line.strip()]
    lines = lines[skip_sessions:][:most_sessions]
    if not lines:
        raise ValueError(f"{path} holds no requests")
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
        raise ValueError(f"{path} mixes hashes of {sorted(sizes)} tokens; put each size into a separate file")
    if not requests:
        raise ValueError(f"{path} holds sessions without requests only")
    return RecordedLoad(sizes.pop(), tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _opened(path: Path) -> Any:
    encoding = "utf-8-sig"  # some editors begin a file with a mark
    return gzip.open(path, "rt", encoding=encoding) if path.suffix == ".gz" else path.open(encoding=encoding)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"no field {error}" if isinstance(error, KeyError) else str(error)


def _requests_of(entry: Any, number: int, start_s: float) -> tuple[int, list[RecordedRequest]]:
    """Return the tokens of a hash and the requests of one line."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"need a JSON object, found {type(entry).__name__}")
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
    raise ValueError("need the fields of a session (requests, block_size) or of Mooncake's traces (input_length)")


def _of_agents(requests: Any, start_s: float, agents: Iterator[int]) -> Iterator[tuple[int, float, Mapping[str, Any]]]:
    """Yield the requests of an agent and its sub-agents, each with agent and arrival."""
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
        raise TypeError("hash_ids must be a list of whole numbers")
    if len(hashes) < prompt_len // size:
        raise ValueError(f"{prompt_len} prompt tokens have {prompt_len // size} runs of {size}, found {len(hashes)}")
    return RecordedRequest(arrival_s, session, prompt_len, reply_len, tuple((names, content) for content in hashes))


def _count(entry: Mapping[str, Any], name: str, least: int, limit: int = _MOST_TOKENS) -> int:
    value = entry[name]
    if type(value) is not int or not least <= value < limit:
        raise ValueError(f"{name} must be a whole number from {least} to below {limit}, found {value!r}")
    return value


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry[name]
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a time, 0 or more, found {value!r}")
    return float(value)
