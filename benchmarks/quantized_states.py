"""Measure how quantized cached states change a model's predictions after a hit, and how many more states fit.

    PYTHONPATH=. python benchmarks/quantized_states.py [--limit-bytes N] [--turn N] [--device cpu|cuda] [--json]

The shipped model reads held-out files of Python's standard library as conversations. Each turn adds `--turn` tokens to
the preceding text and starts from the state at its end, so a text of n turns is quantized n - 1 times. A second engine
stores cached states in float32 and does the same. Bits are summed over all tokens after a hit. After each turn, both
engines generate a greedy reply, which is compared up to the first difference. State sizes are those of published
models, including conv windows and scales.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring.machine import describe_machine
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer
from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS
from megatron_mamba_cache.recurrences.interface import StateGroup, StateTensor
from megatron_mamba_cache.recurrences.layout import SlotLayout
from megatron_mamba_cache.recurrences.slab_shape import SlabShape, UnitBytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from measure_bits_per_byte import first_bytes, installed_library, library_part, library_version

BLOCK = 256
CONTEXT = 4096
REPLY = 64
FP32, BF16 = torch.float32, torch.bfloat16
GIB = 2**30
SHAPES = {"8B": (24, 10240, (128, 128, 64), 16384), "Nemotron 3 Nano": (23, 6144, (64, 128, 64), 6144)}
"""Mamba layers, channels of the convolution, (heads, d_state, head_dim), and bytes of KV a token."""
BUDGET = 40 * GIB


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of a cached state in fp32, bf16 and int8.

    Args:
        layer_bytes: Bytes of the state in one layer.
        num_slots: Number of cached states in a budget of 40 GiB, in slabs shared with KV blocks; live states not
            counted.
    """

    shape: str
    layers: int
    layer_bytes: list[int]
    num_slots: list[int]

    @staticmethod
    def of(shape: str) -> "Sizes":
        """Return the sizes for a model of `SHAPES`, whose conv windows are bf16."""
        layers, conv_dim, ssm, token_bytes = SHAPES[shape]

        def groups_of(dtype: torch.dtype) -> list[StateGroup]:
            window = StateTensor("conv", (3, conv_dim), BF16, motion="window")
            return [StateGroup(tuple(range(layers)), (window, StateTensor("ssm", ssm, dtype, is_matrix=True)))]

        layouts = (
            SlotLayout.of(groups_of(FP32)),
            SlotLayout.of(groups_of(BF16)),
            CACHED_FORMS["int8"].layout(groups_of(FP32), SlotLayout.of(groups_of(FP32))),
        )
        units = [UnitBytes(layout.aligned_bytes, token_bytes * BLOCK, 512) for layout in layouts]
        slabs = [SlabShape.fitting([unit]) for unit in units]
        num_slots = [slab.slots_per_slab * slab.slabs_in(BUDGET, unit) for slab, unit in zip(slabs, units, strict=True)]
        return Sizes(shape, layers, [unit.state // layers for unit in units], num_slots)


@dataclass(slots=True)
class Scores:
    """Predictions of an engine on the texts.

    Args:
        bits: Sum of -log2(probability) over all tokens after a hit.
        best: Most probable token at each of these positions.
        replies: Greedy reply after each turn with a hit.
        num_hits: Number of turns that started from a cached state.
    """

    bits: float
    best: list[int]
    replies: list[list[int]]
    num_hits: int


class ScoringEngine:
    """Engine that serves one request at a time and keeps the logits of its prompt."""

    def __init__(self, model: Any, cached_state_dtype: str) -> None:
        config = CacheConfig(
            block_size_tokens=BLOCK,
            cache_gb=0.5,
            max_requests=1,
            max_tokens=CONTEXT,
            max_sequence_length=CONTEXT + REPLY,
            conv_state_dtype="fp32",
            cached_state_dtype=cached_state_dtype,
        )
        self._engine = build_engine(model, config, materialize_only_last_token_logits=False)
        self._logits: dict[int, Tensor] = {}
        self._hook = model.output_layer.register_forward_hook(self._note)
        self._num_requests = 0

    @staticmethod
    @contextmanager
    def over(model: Any, cached_state_dtype: str) -> Iterator["ScoringEngine"]:
        """Context manager that yields an engine and frees its memory at the end."""
        scoring = ScoringEngine(model, cached_state_dtype)
        try:
            yield scoring
        finally:
            scoring._hook.remove()
            scoring._engine.close()

    def read(self, texts: Sequence[Sequence[int]], turn: int) -> Scores:
        """Read texts turn by turn, and record the predictions."""
        scores = Scores(0.0, [], [], 0)
        for text in texts:
            for end in range(turn, len(text) + 1, turn):
                reply, cached = self._serve(text[:end])
                if cached:
                    scores.num_hits += 1
                    scores.replies.append(reply)
                    self._score(text, range(cached, min(end, len(text) - 1)), scores)
        return scores

    def _score(self, text: Sequence[int], positions: range, scores: Scores) -> None:
        logits = torch.stack([self._logits[position] for position in positions]).double()
        following = torch.tensor(text[positions.start + 1 : positions.stop + 1], device=logits.device)
        scores.bits += torch.nn.functional.cross_entropy(logits, following, reduction="sum").item() / math.log(2)
        scores.best += logits.argmax(-1).tolist()

    def _serve(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Return the greedy reply, and the number of cached prompt tokens."""
        self._logits.clear()
        request_id = self._num_requests
        self._num_requests += 1
        greedy = SamplingParams(num_tokens_to_generate=REPLY, top_k=1, termination_id=-1)
        self._engine.add_request(request_id, list(prompt), greedy)
        while self._engine.has_unfinished_requests():
            for record in self._engine.step_modern()["finished_request_records"]:
                reply = list(record.merge().generated_tokens)
        return reply, self._engine.cached_tokens(request_id)

    def _note(self, _module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        positions = self._engine.context.step.batch.positions.tolist()
        self._logits |= zip(positions, output[0].flatten(0, 1).clone(), strict=False)


def main() -> None:
    """Read the texts with both engines, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-bytes", type=int, default=60_000, help="read whole files until they have N bytes")
    parser.add_argument("--turn", type=int, default=2 * BLOCK, help=f"tokens of a turn, a multiple of {BLOCK}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    flags = parser.parse_args()
    if flags.turn < BLOCK or flags.turn % BLOCK:
        parser.error(f"--turn is {flags.turn}; it must be a multiple of {BLOCK}")
    with torch.device(flags.device):
        model = load_hugging_face(SHIPPED_MODEL, torch.float32).model
    texts, num_bytes = read_texts(flags.limit_bytes, flags.turn)
    found = {}
    for dtype in ("live", "int8"):
        with ScoringEngine.over(model, dtype) as engine:
            found[dtype] = engine.read(texts, flags.turn)
    report = compared(found["live"], found["int8"], num_bytes)
    sizes = [Sizes.of(shape) for shape in SHAPES]
    if flags.json:
        print(json.dumps({"quality": report, "sizes": [asdict(size) for size in sizes]}, indent=2))
    else:
        print(f"{describe_machine()}\n\nText: library of CPython {library_version(installed_library())}.\n")
        print("\n".join([*quality_table(report), "", *sizes_table(sizes)]))


def read_texts(limit_bytes: int, turn: int) -> tuple[list[list[int]], int]:
    """Return held-out files as tokens, cut to whole turns, and the number of bytes after the first turns."""
    tokenizer = load_tokenizer(SHIPPED_MODEL, 2048)
    assert tokenizer is not None
    texts, num_bytes = [], 0
    for source in first_bytes(library_part(installed_library(), "held-out"), limit_bytes):
        tokens = [0, *tokenizer.tokenize(source.document)][:CONTEXT]
        text = tokens[: len(tokens) // turn * turn]
        if len(text) > turn:
            texts.append(text)
            num_bytes += sum(len(tokenizer.bytes_of(token) or b"") for token in text[turn + 1 :])
    return texts, num_bytes


def compared(exact: Scores, quantized: Scores, num_bytes: int) -> dict[str, float]:
    """Return the results of both engines, and how often their predictions differ."""
    assert exact.num_hits == quantized.num_hits
    same = [common(*pair) for pair in zip(exact.replies, quantized.replies, strict=True)]
    num_changed = sum(mine != other for mine, other in zip(exact.best, quantized.best, strict=True))
    num_left = sum(length < REPLY for length in same)
    return {
        "turns after a hit": exact.num_hits,
        "tokens after a hit": len(exact.best),
        "bits per byte, fp32": exact.bits / num_bytes,
        "bits per byte, int8": quantized.bits / num_bytes,
        "difference, %": 100 * (quantized.bits / exact.bits - 1),
        "most probable token differs, per 1,000 tokens": 1000 * num_changed / len(exact.best),
        "reply tokens until the first difference": sum(same),
        "first differences in greedy replies, per 1,000 tokens": 1000 * num_left / max(sum(same), 1),
    }


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two replies."""
    return next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def quality_table(report: dict[str, float]) -> list[str]:
    """Return the lines of a Markdown table."""
    figures = [f"| {name} | {value:,.4f} |".replace(".0000 |", " |") for name, value in report.items()]
    return ["| | |", "|---|---|", *figures]


def sizes_table(sizes: Sequence[Sizes]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| | fp32 | bf16 | int8 | times fp32's | times bf16's |", "|---|---|---|---|---|---|"]
    for size in sizes:
        of_layer, num_slots = size.layer_bytes, size.num_slots
        ratios = f"{of_layer[0] / of_layer[2]:.3f} | {of_layer[1] / of_layer[2]:.3f}"
        more = f"{num_slots[2] / num_slots[0]:.3f} | {num_slots[2] / num_slots[1]:.3f}"
        lines.append(f"| {size.shape}, bytes a layer | {' | '.join(f'{number:,}' for number in of_layer)} | {ratios} |")
        lines.append(
            f"| {size.shape}, states in 40 GiB | {' | '.join(f'{number:,}' for number in num_slots)} | {more} |"
        )
    return lines


if __name__ == "__main__":
    main()
