"""Open-loop loads of multi-turn conversations, generated from a seed or read from a trace. Needs no torch.

In an open-loop load, sessions arrive as a Poisson process that does not depend on the server. Within a session, each
turn arrives after the reply to the preceding turn and the user's think time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Args:
        think_s: Seconds from the end of the preceding reply, or from the arrival of the session, to this request.
        new_tokens: Tokens that the user adds to the history.
        num_reply: Number of tokens to generate.
    """

    think_s: float
    new_tokens: Tokens
    num_reply: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session; the prompt of each turn is `prefix`, all earlier turns and replies, and the turn's new tokens.

    Args:
        arrival_s: Arrival of the session, in seconds from the start of the load.
        prefix: System prompt, few-shot examples or files of a repository, shared with other sessions; may be empty.
    """

    arrival_s: float
    prefix: Tokens
    turns: tuple[Turn, ...]

    def slower(self, factor: float) -> "Conversation":
        """Return the conversation with all times multiplied by `factor`."""
        turns = tuple(replace(turn, think_s=turn.think_s * factor) for turn in self.turns)
        return Conversation(self.arrival_s * factor, self.prefix, turns)


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution, clipped to the range from `least` to `most`.

    `sigma` is the standard deviation of the logarithm; with 0, all values are equal.
    """

    median: float
    sigma: float = 0.0
    least: float = 1.0
    most: float = float("inf")

    def sample(self, random: np.random.Generator) -> float:
        """Sample a value."""
        return float(min(max(self.median * np.exp(self.sigma * random.standard_normal()), self.least), self.most))

    def count(self, random: np.random.Generator) -> int:
        """Sample a whole number of at least 1."""
        return max(1, round(self.sample(random)))

    def scaled(self, factor: float) -> "Spread":
        """Return the distribution with all values multiplied by `factor`."""
        return Spread(self.median * factor, self.sigma, self.least * factor, self.most * factor)


@dataclass(frozen=True, slots=True)
class SessionKind:
    """A kind of sessions, with distributions of their lengths in tokens and their think times.

    Args:
        share: Weight of this kind among all sessions.
        new_len, reply_len: Numbers of new tokens and of reply tokens per turn.
        turns: Number of turns per session.
        think_s: Think time in seconds before each turn except the first.
        num_prefixes: Number of shared prefixes; 0 if sessions share no text.
        prefix_len: Length of each shared prefix.
        zipf: Exponent of the popularity of prefixes: the i-th prefix has weight i ** -zipf.
    """

    share: float
    new_len: Spread
    reply_len: Spread
    turns: Spread = Spread(1)
    think_s: Spread = Spread(0, least=0)
    num_prefixes: int = 0
    prefix_len: Spread = Spread(1)
    zipf: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A load: kinds of sessions, their number, and the rate `sessions_per_s` of their Poisson process."""

    num_sessions: int
    sessions_per_s: float
    kinds: tuple[SessionKind, ...]

    def scaled(self, *, tokens: float = 1.0, sessions: float = 1.0, seconds: float = 1.0) -> "LoadShape":
        """Return the load with all lengths, the number of sessions and all times multiplied by the three factors.

        Lengths and the number of sessions are at least 1.
        """
        kinds = tuple(
            replace(
                kind,
                new_len=kind.new_len.scaled(tokens),
                reply_len=kind.reply_len.scaled(tokens),
                prefix_len=kind.prefix_len.scaled(tokens),
                think_s=kind.think_s.scaled(seconds),
            )
            for kind in self.kinds
        )
        return LoadShape(max(1, round(self.num_sessions * sessions)), self.sessions_per_s / seconds, kinds)


_QUESTION = Spread(60, 1.0, least=4, most=2_000)
_ANSWER = Spread(220, 0.8, least=8, most=1_500)
_READING = Spread(25, 1.0, least=1, most=900)

_ASSISTANTS = SessionKind(
    share=1,
    new_len=_QUESTION,
    reply_len=_ANSWER,
    turns=Spread(1.6, 0.7, most=8),
    think_s=_READING,
    num_prefixes=24,
    prefix_len=Spread(1_800, 0.6, least=300, most=6_000),
)
_LONG_CONVERSATIONS = SessionKind(
    share=1,
    new_len=Spread(120, 1.2, least=4, most=4_000),
    reply_len=Spread(320, 0.7, least=16, most=2_000),
    turns=Spread(9, 0.6, most=40),
    think_s=Spread(35, 1.0, least=1, most=900),
    num_prefixes=1,
    prefix_len=Spread(350),
)
_ONE_OFFS = SessionKind(share=1, new_len=Spread(1_800, 0.9, least=50, most=16_000), reply_len=_ANSWER)

LOADS: dict[str, LoadShape] = {
    # Several applications share one server; each has its own system prompt, and most sessions have one or two turns.
    "system prompts": LoadShape(1_500, 3.0, (_ASSISTANTS,)),
    # A chat application: one short system prompt, and histories of many turns.
    "long conversations": LoadShape(400, 0.4, (_LONG_CONVERSATIONS,)),
    # Both of the above, and single requests without shared text, for example summaries and evaluations.
    "mixed": LoadShape(
        1_000,
        1.2,
        (replace(_ASSISTANTS, share=0.45), replace(_LONG_CONVERSATIONS, share=0.2), replace(_ONE_OFFS, share=0.35)),
    ),
    # Classification and extraction: many examples in the prompt, a short input, a short answer, one turn.
    "few-shot": LoadShape(
        2_000,
        6.0,
        (
            SessionKind(
                share=1,
                new_len=Spread(150, 0.8, least=10, most=2_000),
                reply_len=Spread(40, 0.8, least=2, most=300),
                num_prefixes=40,
                prefix_len=Spread(3_000, 0.5, least=600, most=8_000),
                zipf=0.9,
            ),
        ),
    ),
    # A coding assistant: prompts begin with files of a repository, followed by an editing session.
    "repository": LoadShape(
        300,
        0.3,
        (
            SessionKind(
                share=1,
                new_len=Spread(400, 1.0, least=20, most=6_000),
                reply_len=Spread(300, 0.9, least=16, most=2_000),
                turns=Spread(5, 0.7, most=25),
                think_s=Spread(20, 1.2, least=1, most=900),
                num_prefixes=16,
                prefix_len=Spread(12_000, 0.5, least=4_000, most=28_000),
            ),
        ),
    ),
    # No prompt can hit the cache, so this load measures the overhead of the cache.
    "unrelated": LoadShape(1_000, 2.0, (_ONE_OFFS,)),
}


def conversations(shape: LoadShape, seed: int, vocab_size: int) -> list[Conversation]:
    """Generate the sessions of a load, in order of arrival; equal arguments give equal tokens.

    A scaled load has the same sessions, prefixes and turns as the original load, except for rounding.
    """
    random, text = (np.random.default_rng([seed, stream]) for stream in range(2))  # so lengths do not depend on tokens
    arrivals = np.cumsum(random.exponential(1 / shape.sessions_per_s, shape.num_sessions))
    prefixes = [
        [_tokens(kind.prefix_len.count(random), vocab_size, text) for _ in range(kind.num_prefixes)]
        for kind in shape.kinds
    ]
    shares = np.array([kind.share for kind in shape.kinds])
    numbers = random.choice(len(shape.kinds), shape.num_sessions, p=shares / shares.sum())
    sessions = []
    for arrival, number in zip(arrivals, numbers, strict=True):
        kind = shape.kinds[number]
        prefix = _popular(prefixes[number], kind.zipf, random)
        sessions.append(Conversation(float(arrival), prefix, _turns(kind, vocab_size, random, text)))
    return sessions


def read_trace(path: Path, vocab_size: int, seed: int) -> list[Conversation]:
    """Read a trace of lengths with one JSON object per turn and line, and generate tokens for it.

    Every line has "session" (a string or number), "new_tokens" and "reply_tokens" (at least 1). The first line of a
    session may have "arrival_s", and later lines may have "think_s"; both default to 0. The first line also has
    "prefix" (a string or number) and "prefix_tokens" if the session begins with a shared prefix.

    The lines of a session are in the order of its turns; lines of different sessions may interleave. Equal values of
    "prefix" give equal tokens; if their lengths differ, the longer prefix begins with the shorter one.

    Raises:
        ValueError: If a field is missing or invalid; the message names the line.
    """
    sessions: dict[str | float, list[_TraceLine]] = {}
    longest: dict[str | float, int] = {}
    for number, text in enumerate(Path(path).read_text().splitlines(), start=1):
        if text.strip():
            line = _parse_line(text, f"{path}, line {number}")
            sessions.setdefault(line.session, []).append(line)
            longest[line.prefix] = max(longest.get(line.prefix, 0), line.prefix_tokens)
    random = np.random.default_rng(seed)
    prefixes = {prefix: _tokens(length, vocab_size, random) for prefix, length in longest.items()}
    read = [
        Conversation(
            lines[0].arrival_s,
            prefixes[lines[0].prefix][: lines[0].prefix_tokens],
            tuple(
                Turn(line.think_s if index else 0.0, _tokens(line.new_tokens, vocab_size, random), line.reply_tokens)
                for index, line in enumerate(lines)
            ),
        )
        for lines in sessions.values()
    ]
    return sorted(read, key=lambda session: session.arrival_s)


@dataclass(frozen=True, slots=True)
class _TraceLine:
    session: str | float
    new_tokens: int
    reply_tokens: int
    prefix: str | float = ""
    prefix_tokens: int = 0
    arrival_s: float = 0.0
    think_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 1), ("reply_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, found {value!r}")
        for name in ("arrival_s", "think_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of seconds of at least 0, found {value!r}")
        for name in ("session", "prefix"):
            if type(getattr(self, name)) not in (str, int, float):
                raise ValueError(f"{name} must be a string or a number, found {getattr(self, name)!r}")


def _turns(
    kind: SessionKind, vocab_size: int, random: np.random.Generator, text: np.random.Generator
) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            kind.think_s.sample(random) if index else 0.0,
            _tokens(kind.new_len.count(random), vocab_size, text),
            kind.reply_len.count(random),
        )
        for index in range(kind.turns.count(random))
    )


def _popular(prefixes: Sequence[Tokens], zipf: float, random: np.random.Generator) -> Tokens:
    if not prefixes:
        return ()
    weights = np.arange(1, len(prefixes) + 1) ** -zipf
    return prefixes[int(random.choice(len(prefixes), p=weights / weights.sum()))]


def _tokens(count: int, vocab_size: int, random: np.random.Generator) -> Tokens:
    return tuple(random.integers(vocab_size, size=count).tolist())


def _parse_line(text: str, location: str) -> _TraceLine:
    try:
        return _TraceLine(**json.loads(text))
    except (TypeError, ValueError) as error:  # invalid JSON, not an object, or a missing, unknown or invalid field
        raise ValueError(f"{location}: {error}") from error
