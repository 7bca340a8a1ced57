"""Measure the token rate of a chat of many users, each sending the next turn when a reply ends.

    PYTHONPATH=. python3 benchmarks/chat.py [--shape NAME] [--json FILE]

Each user has a conversation of four turns that begins with the same tokens as everybody's. So at any moment some
replies begin while others go on, and steps mix prompts with decoding rows: up to `cuda_graph_prefill_tokens` prompt
tokens such a step is a CUDA graph, beyond that it runs eagerly. A line is one engine with its most prompt tokens of a
graph and most tokens of a step; engines serve the same load one after another, the first one twice, so that a
difference between its lines is the machine's. "Time per token" is the mean over replies of a reply's time after its
first token, by token.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from loads.conversation_load import Conversation, Turn
from loads.open_loop import OpenLoop, ServedTurn
from loads.serving_engine import MODES, ServedShape, add_shape_arguments, model_of, serving_engine, shape_of
from measuring.machine import describe_machine

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries


@dataclass(frozen=True, slots=True)
class Chat:
    """Tokens of a chat: a shared prompt, new ones of each turn, and a reply."""

    users: int = 32
    turns: int = 4
    shared: int = 1500
    new: int = 200
    reply: int = 128


SCALES = {"tiny": Chat(users=4, turns=2, shared=150, new=20, reply=12)}
LIMITS = {
    "8b": {"state_gb": 16.0, "kv_gb": 16.0},
    "nano3": {"state_gb": 12.0, "kv_gb": 4.0},
    "super": {"state_gb": 12.0, "kv_gb": 4.0},
    "qwen36-27b": {"state_gb": 24.0, "kv_gb": 8.0},
    "qwen36-35b": {"state_gb": 12.0, "kv_gb": 4.0},
    "qwen3-next": {"state_gb": 12.0, "kv_gb": 4.0},
    "small": {"state_gb": 0.5},
}


@dataclass(frozen=True, slots=True)
class StepsOfAKind:
    """Steps of one kind: their number, mean tokens and mean milliseconds."""

    count: int
    tokens: float
    ms: float

    @staticmethod
    def of(steps: Sequence[tuple[int, float]]) -> "StepsOfAKind":
        """Summarize steps, each given by its tokens and seconds."""
        if not steps:
            return StepsOfAKind(0, 0.0, 0.0)
        return StepsOfAKind(len(steps), mean(tokens for tokens, _ in steps), 1e3 * mean(s for _, s in steps))


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """One engine under the load; milliseconds are means."""

    graph_tokens: int
    max_tokens: int
    per_token_ms: float
    first_token_ms: float
    first_token_later_ms: float
    seconds: float
    decode: StepsOfAKind
    mixed_in_graphs: StepsOfAKind
    mixed_eager: StepsOfAKind


class WatchedEngine:
    """An engine that records each step's kind, tokens and seconds."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.steps: dict[str, list[tuple[int, float]]] = {"decode": [], "mixed_in_graphs": [], "mixed_eager": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step_modern(self) -> Any:
        """Run a step."""
        counters = self._engine.context.counters
        graphs, prefilled = counters.graph_steps, counters.prefill_tokens_computed
        decoded, began = counters.decode_tokens_computed, time.perf_counter()
        result = self._engine.step_modern()  # ends by reading the step's tokens back
        seconds = time.perf_counter() - began
        num_prefilled = counters.prefill_tokens_computed - prefilled
        kind = "mixed_in_graphs" if counters.graph_steps > graphs else "mixed_eager"
        num_tokens = num_prefilled + counters.decode_tokens_computed - decoded
        self.steps[kind if num_prefilled else "decode"].append((num_tokens, seconds))
        return result


def conversations_of(chat: Chat, vocab_size: int, seed: int) -> list[Conversation]:
    """Return the turns of each user, without pauses between a reply and the next turn."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    shared = tokens(chat.shared)
    turns = [[Turn(0.0, tokens(chat.new), chat.reply) for _ in range(chat.turns)] for _ in range(chat.users)]
    return [Conversation(0.0, shared, tuple(of_user)) for of_user in turns]


def serve(model: Any, shape: ServedShape, chat: Chat, graph_tokens: int, max_tokens: int) -> ChatFigures:
    """Serve the load with one engine, after a warmup load of other tokens."""
    shape = replace(shape, max_tokens=max_tokens, prefill_graph_tokens=graph_tokens)
    with serving_engine(model, shape, MODES["full"]) as engine:
        OpenLoop(engine, conversations_of(replace(chat, turns=1), shape.vocab_size, seed=1)).run()
        watched = WatchedEngine(engine)
        load = OpenLoop(watched, conversations_of(chat, shape.vocab_size, seed=0)).run()
    return ChatFigures(
        graph_tokens,
        max_tokens,
        per_token_ms=1e3 * mean(turn.time_per_output_token or 0.0 for turn in load.turns),
        first_token_ms=1e3 * mean(_first_token_s(load.turns)),
        first_token_later_ms=1e3 * mean(_first_token_s([turn for turn in load.turns if turn.turn])),
        seconds=load.seconds,
        **{kind: StepsOfAKind.of(steps) for kind, steps in watched.steps.items()},
    )


def _first_token_s(turns: Sequence[ServedTurn]) -> list[float]:
    return [seconds for turn in turns if (seconds := turn.time_to_first_token) is not None]


def table(found: Sequence[ChatFigures]) -> str:
    """Return the figures as Markdown: a line per engine."""
    lines = [
        "| prompt tokens of a graph | tokens of a step | ms a token | ms to first token | from the second turn on "
        "| seconds in all | decode steps: number, ms | mixed in graphs: number, tokens, ms | mixed, eager |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        mixed = (f"{kind.count}, {kind.tokens:.0f}, {kind.ms:.1f}" for kind in (one.mixed_in_graphs, one.mixed_eager))
        lines.append(
            f"| {one.graph_tokens:,} | {one.max_tokens:,} | {one.per_token_ms:.2f} | {one.first_token_ms:.0f} "
            f"| {one.first_token_later_ms:.0f} | {one.seconds:.2f} | {one.decode.count}, {one.decode.ms:.2f} "
            f"| {' | '.join(mixed)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument(
        "--graph-tokens", type=int, nargs="+", default=[512, 1024], metavar="N", help="default: 512 1024"
    )
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8192], metavar="N", help="default: 8192")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, LIMITS)
    chat = SCALES.get(arguments.shape, Chat())
    engines = [(graph, most) for most in arguments.max_tokens for graph in arguments.graph_tokens]
    with quiet_libraries(), own_warnings_hidden():
        model = model_of(shape)
        found = [serve(model, shape, chat, *engine) for engine in (engines[0], *engines)]
    print(table(found))
    if arguments.json:
        figures = {"machine": describe_machine(), "chat": asdict(chat), "engines": [asdict(one) for one in found]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
