"""Measure the gain of a cache on a busy server: latency and throughput under the same load.

    PYTHONPATH=. python3 benchmarks/serving.py [--shape tiny] [--load NAME | --trace FILE | --recorded FILE]
        [--json FILE] [--plots FOLDER]

Multi-turn conversations arrive in real time, independent of the engine's load (`open_loop`). Several engines serve them
one after another: without a cache, with states at the boundaries of prompts only, and with states of replies as well;
each without drafts and with drafts from prompt lookup. Lengths, arrivals and the users' texts are the same for all
engines. Each engine generates its own greedy replies, so the prompts of later turns can have different tokens, but
always the same number of them. The weights are random, so the results do not show the gain of drafts with a real model.

Before the measurement, the first engine serves the first turns of a few conversations. `serving_figures` defines each
measured quantity.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loads.conversation_load import LOADS, Conversation, conversations, read_trace
from loads.open_loop import OpenLoop, ServedLoad, fitting
from loads.recorded_sessions import recorded_conversations
from loads.serving_engine import (
    MODES,
    ServedShape,
    add_shape_arguments,
    add_weights_arguments,
    model_of,
    serving_engine,
    shape_of,
)
from measuring.gpu_time import gpu_timer
from measuring.machine import describe_machine
from measuring.serving_figures import ServingFigures, figures_of, table
from measuring.serving_plots import MISSING, can_plot, write_plots
from tqdm import tqdm

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.planning.recorded_load import read_load

NUM_PROFILED = 40
NUM_WARMING = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the engines that are compared."""

    mode: str
    num_drafts: int

    @property
    def name(self) -> str:
        """Name of the engine in the header of the table."""
        return f"{self.mode}, K = {self.num_drafts}"


@dataclass(frozen=True, slots=True)
class Served:
    """Results and requests of one engine."""

    figures: ServingFigures
    load: ServedLoad


def serve_all(
    shape: ServedShape, load: Sequence[Conversation], variants: Sequence[Variant], max_seconds: float = float("inf")
) -> dict[str, Served]:
    """Serve the conversations with each engine."""
    model = model_of(shape)
    load = fitting(load, shape.max_length)
    serve(model, shape, [_first_turn(conversation) for conversation in load[:NUM_WARMING]], variants[0], max_seconds)
    return {variant.name: serve(model, shape, load, variant, max_seconds) for variant in variants}


def _first_turn(conversation: Conversation) -> Conversation:
    return Conversation(0.0, conversation.prefix, conversation.turns[:1])


def serve(model: Any, shape: ServedShape, load: Sequence[Conversation], variant: Variant, max_seconds: float) -> Served:
    """Serve the conversations with one engine."""
    wanted = sum(turn.num_reply for conversation in load for turn in conversation.turns)
    bar = tqdm(total=wanted, desc=variant.name, unit="token", file=sys.stderr, leave=False, disable=None)
    with bar, serving_engine(model, shape, MODES[variant.mode], variant.num_drafts) as engine:
        loop = OpenLoop(engine, load, max_seconds=max_seconds, on_tokens=bar.update, timer=gpu_timer(NUM_PROFILED))
        served = loop.run()
        slot_bytes = engine.context.shape.state_layout(engine.context.cache_config).slot_bytes
    return Served(figures_of(served, shape.block_size, slot_bytes), served)


def document(found: dict[str, Served], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return all measurements as JSON types; requests have lengths and times, but no tokens."""
    engines = {
        name: asdict(served.figures)
        | {"hit_rate": served.figures.hit_rate, "best_hit_rate": served.figures.best_hit_rate}
        | {"requests": [_request(turn) for turn in served.load.turns]}
        for name, served in found.items()
    }
    return {"machine": describe_machine(), "arguments": arguments, "engines": engines}


def _request(turn: Any) -> dict[str, Any]:
    return {
        "conversation": turn.conversation,
        "turn": turn.turn,
        "arrival": turn.arrival,
        "admitted": turn.admitted,
        "prompt_tokens": len(turn.prompt),
        "cached_tokens": turn.cached,
        "has_ended": turn.has_ended,
        "token_moments": turn.token_moments,
    }


def load_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace, vocab_size: int) -> list[Conversation]:
    """Return the conversations that the flags select."""
    if arguments.trace or arguments.recorded:
        if arguments.rate or arguments.tokens_scale != 1 or (arguments.trace and arguments.time_scale != 1):
            parser.error(
                "a file says how fast and how long: --rate and --tokens-scale change --load, --time-scale that and "
                "--recorded"
            )
        try:
            if arguments.trace:
                return read_trace(arguments.trace, vocab_size, arguments.seed)[: arguments.sessions]
            recorded = recorded_conversations(read_load(arguments.recorded, arguments.sessions), vocab_size)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return [conversation.slower(arguments.time_scale) for conversation in recorded]
    load = LOADS[arguments.load].scaled(tokens=arguments.tokens_scale, seconds=arguments.time_scale)
    load = replace(
        load,
        num_sessions=arguments.sessions or load.num_sessions,
        sessions_per_s=arguments.rate or load.sessions_per_s,
    )
    return conversations(load, arguments.seed, vocab_size)


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--load", choices=LOADS, default="mixed", help="default: %(default)s")
    source.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines of lengths; see conversation_load.py")
    source.add_argument("--recorded", type=Path, metavar="FILE", help="a recorded load; see planning/recorded_load.py")
    add_shape_arguments(parser)
    add_weights_arguments(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 3], metavar="K", help="default: 0 3")
    parser.add_argument("--rate", type=_positive, metavar="R", help="sessions per second; default: that of the load")
    parser.add_argument(
        "--sessions", type=int, metavar="N", help="number of sessions (of lines with --recorded); default: all"
    )
    parser.add_argument("--tokens-scale", type=_positive, default=1.0, metavar="F", help="factor for all lengths")
    parser.add_argument(
        "--time-scale", type=_positive, default=1.0, metavar="F", help="factor for pauses; rates are divided by it"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths, tokens and arrivals")
    parser.add_argument(
        "--max-seconds", type=_positive, default=float("inf"), help="time limit of each engine; default: no limit"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results and requests to FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also write PNG files; needs matplotlib")
    return parser, parser.parse_args()


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"the value must be more than 0, found {text}")
    return value


def main() -> None:
    """Serve, print Markdown, and write JSON and plots."""
    parser, arguments = parse()
    if arguments.plots and not can_plot():
        parser.error(MISSING)
    shape = shape_of(parser, arguments, {})
    load = load_of(parser, arguments, shape.vocab_size)
    variants = [Variant(mode, num_drafts) for num_drafts in arguments.drafts for mode in arguments.modes]
    with quiet_libraries(), own_warnings_hidden():
        found = serve_all(shape, load, variants, arguments.max_seconds)
    figures = {name: served.figures for name, served in found.items()}
    print(table(figures))
    if arguments.json:
        given = {name: str(value) for name, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps(document(found, given), indent=2) + "\n")
    if arguments.plots:
        delays = {
            name: [delay for turn in served.load.turns if (delay := turn.time_to_first_token) is not None]
            for name, served in found.items()
        }
        write_plots(arguments.plots, delays, figures)


if __name__ == "__main__":
    main()
