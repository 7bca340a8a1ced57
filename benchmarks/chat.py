"""Measure the time per token of a chat with many users; each user sends the next turn when a reply ends.

    PYTHONPATH=. python3 benchmarks/chat.py [--shape NAME] [--json FILE]

Each user has a conversation of four turns; all conversations begin with the same tokens. Steps therefore often process
prompts of some users while others decode. Such a step runs as a CUDA graph if it has at most
`cuda_graph_prefill_tokens` prompt tokens, and eagerly otherwise.

A line of the table is one engine, with its maximum number of prompt tokens in a graph and its maximum number of tokens
in a step. Engines serve the same load one after another. The first engine runs twice: the difference between its two
lines shows the noise of the machine. "Time per token" is the mean over all replies of the time per token after the
first.
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
from loads.serving_engine import (
    MODES,
    ServedShape,
    add_shape_arguments,
    add_weights_arguments,
    model_of,
    serving_engine,
    shape_of,
)
from measuring.machine import describe_machine

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries


@dataclass(frozen=True, slots=True)
class Chat:
    """Numbers of tokens in a chat: shared prefix, new tokens per turn, and reply."""

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
    """Steps of one kind: their number, and their mean tokens and milliseconds."""

    count: int
    tokens: float
    ms: float

    @staticmethod
    def of(steps: Sequence[tuple[int, float]]) -> "StepsOfAKind":
        """Summarize steps, each given by its number of tokens and its seconds."""
        if not steps:
            return StepsOfAKind(0, 0.0, 0.0)
        return StepsOfAKind(len(steps), mean(tokens for tokens, _ in steps), 1e3 * mean(s for _, s in steps))


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """Results of one engine; times are means in milliseconds."""

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
    """Engine that records the kind, the number of tokens and the seconds of each step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.steps: dict[str, list[tuple[int, float]]] = {"decode": [], "mixed_in_graphs": [], "mixed_eager": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step_modern(self) -> Any:
        """Run a step and record it."""
        counters = self._engine.context.counters
        graphs, prefilled = counters.graph_steps, counters.prefill_tokens_computed
        decoded, began = counters.decode_tokens_computed, time.perf_counter()
        result = self._engine.step_modern()  # returns after the tokens were copied to the host
        seconds = time.perf_counter() - began
        num_prefilled = counters.prefill_tokens_computed - prefilled
        kind = "mixed_in_graphs" if counters.graph_steps > graphs else "mixed_eager"
        num_tokens = num_prefilled + counters.decode_tokens_computed - decoded
        self.steps[kind if num_prefilled else "decode"].append((num_tokens, seconds))
        return result


def conversations_of(chat: Chat, vocab_size: int, seed: int) -> list[Conversation]:
    """Return the conversation of each user; a turn follows the preceding reply without a pause."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    shared = tokens(chat.shared)
    turns = [[Turn(0.0, tokens(chat.new), chat.reply) for _ in range(chat.turns)] for _ in range(chat.users)]
    return [Conversation(0.0, shared, tuple(of_user)) for of_user in turns]


def serve(model: Any, shape: ServedShape, chat: Chat, graph_tokens: int, max_tokens: int) -> ChatFigures:
    """Serve the load with one engine, after a warmup load with other tokens."""
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
    """Return a Markdown table with a line per engine."""
    lines = [
        "| prompt tokens per graph | tokens per step | ms per token | ms to first token | later turns "
        "| total seconds | decode steps: number, ms | mixed steps in graphs: number, tokens, ms | mixed, eager |",
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
    add_weights_arguments(parser)
    parser.add_argument(
        "--graph-tokens", type=int, nargs="+", default=[512, 1024], metavar="N", help="default: 512 1024"
    )
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8192], metavar="N", help="default: 8192")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, LIMITS)
    chat = SCALES.get(arguments.shape, Chat())
    engines = [(graph, most) for most in arguments.max_tokens for graph in arguments.graph_tokens]
    with quiet_libraries(), own_warnings_hidden():
        model = model_of(shape)
        found = [serve(model, shape, chat, *engine) for engine in (engines[0], *engines)]
    print(table(found))
    if arguments.json:
        figures = {
            "machine": describe_machine(),
            "weights": shape.weights,
            "chat": asdict(chat),
            "engines": [asdict(one) for one in found],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
