"""Steps that are padded to the shape of a captured graph."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.prefill_rows import PAD_SLOT
from ..policy.identifiers import BlockId
from ..policy.requests import RunningRequest, num_decoding
from .buffers import StepBuffers
from .padding_rows import decode_padding_row, prefill_padding_row


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Decode rows of at most `width` tokens each, then prefill rows of `num_prefill_tokens` tokens in total.

    Prefill tokens begin after one token for each decode row: beside prefill rows, `width` is 1.
    """

    num_decode_rows: int = 0
    width: int = 1
    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of both kinds."""
        return self.num_decode_rows + self.num_prefill_rows

    @property
    def num_tokens(self) -> int:
        """Tokens that the graph computes."""
        return self.num_decode_rows * self.width + self.num_prefill_tokens

    @property
    def num_logits(self) -> int:
        """Tokens whose logits the graph computes."""
        return self.num_decode_rows * self.width + self.num_prefill_rows

    @property
    def most_queries(self) -> tuple[int, ...]:
        """Most query tokens of each row that fit together: the first prefill row may take them all."""
        others = (0,) * (self.num_prefill_rows - 1)
        prefilling = (self.num_prefill_tokens, *others) if self.num_prefill_rows else ()
        return (self.width,) * self.num_decode_rows + prefilling

    def num_chunks(self, ssm_chunk_size: int) -> int:
        """Return the most SSM chunks that the prefill rows can have: a row cuts at most two of them short."""
        return self.num_prefill_tokens // ssm_chunk_size + 2 * self.num_prefill_rows

    @staticmethod
    def of(rows: Sequence[RunningRequest]) -> "StepShape":
        """Return the smallest shape that holds the rows of a step."""
        num_decode = num_decoding(rows)
        width = max((row.scheduled for row in rows[:num_decode]), default=1)
        prefilling = rows[num_decode:]
        return StepShape(num_decode, width, len(prefilling), sum(row.scheduled for row in prefilling))

    def holds(self, step: "StepShape") -> bool:
        """Return whether a step of another shape fits; steps with and without prefill rows have separate shapes."""
        return (
            step.num_decode_rows <= self.num_decode_rows
            and step.width <= self.width
            and step.num_prefill_rows <= self.num_prefill_rows
            and step.num_prefill_tokens <= self.num_prefill_tokens
            and bool(step.num_prefill_rows) == bool(self.num_prefill_rows)
        )

    def fullest_rows(self, dummy_block: BlockId) -> list[RunningRequest]:
        """Return padding that fills the shape, at least one token a row; a captured step's views are made for it."""
        decoding = [decode_padding_row(self.width, dummy_block) for _ in range(self.num_decode_rows)]
        lengths = [1] * self.num_prefill_rows
        if lengths:
            lengths[0] += self.num_prefill_tokens - len(lengths)
        return decoding + [prefill_padding_row(length, dummy_block) for length in lengths]

    def pad(self, rows: Sequence[RunningRequest], dummy_block: BlockId) -> list[RunningRequest]:
        """Return the rows of a step with padding between and after them; `places` returns where they are."""
        num_decode = num_decoding(rows)
        num_between = self.num_decode_rows - num_decode
        num_after = self.num_prefill_rows - (len(rows) - num_decode)
        between = [decode_padding_row(1 if self.num_prefill_rows else 0, dummy_block)] if num_between else []
        after = [prefill_padding_row(0, dummy_block)] if num_after else []
        return [*rows[:num_decode], *between * num_between, *rows[num_decode:], *after * num_after]

    def places(self, rows: Sequence[RunningRequest]) -> tuple[int, ...]:
        """Return the place of each row among the padded ones."""
        num_decode = num_decoding(rows)
        num_prefilling = len(rows) - num_decode
        return (*range(num_decode), *range(self.num_decode_rows, self.num_decode_rows + num_prefilling))


def smallest_holding(step: StepShape, shapes: Iterable[StepShape]) -> StepShape | None:
    """Return the narrowest shape that holds a step's, the smallest if several do; None if none does."""
    fitting = [shape for shape in shapes if shape.holds(step)]
    return min(fitting, key=lambda shape: (shape.width, shape.num_tokens), default=None)


def decode_shapes(count: int, max_rows: int, max_drafts: int, max_tokens: int, room: int = 0) -> list[StepShape]:
    """Return shapes to capture: about `count` numbers of rows, each without drafts and with `max_drafts`.

    Args:
        max_rows: That requests can run.
        room: Rows that a shape may have, if more than `max_rows`. A shape whose matrix products are slow for its number
            of tokens gets a row of padding more.
    """
    shapes = []
    for width in sorted({1, 1 + max_drafts}):
        most = max_tokens // width
        numbers = _row_numbers(count, min(max_rows, most))
        adds_row = (num_rows < min(room, most) and _is_slow(num_rows * width) for num_rows in numbers)
        shapes += sorted({StepShape(num_rows + adds, width) for num_rows, adds in zip(numbers, adds_row, strict=True)})
    return shapes


def prefill_shapes(most_tokens: int, max_rows: int, max_tokens: int) -> list[StepShape]:
    """Return shapes of few prefill rows with up to `most_tokens` tokens: alone, after some decode rows and after all.

    They have up to `most_padding_rows` more rows than requests can run. An odd number of decode rows is best: matrix
    products of 447 tokens take two thirds of the time of 448, and those of 415 take 0.83 of that of 416 (8B model,
    H100). "Some" are the largest odd number within an eighth, and all but one of an even number of requests are odd.
    """
    num_prefill = min(_PREFILL_ROWS, max_rows)
    some = (max_rows // _PART - 1) | 1 if max_rows >= _PART * _PREFILL_ROWS else 0
    return [
        StepShape(num_decode, 1, num_prefill, size)
        for num_decode in sorted({0, some, max_rows - 1})
        for size in _prefill_sizes(min(most_tokens, max_tokens - num_decode), num_decode)
        if size >= num_prefill
    ]


def most_padding_rows(max_rows: int) -> int:
    """Return by how many rows a shape of `prefill_shapes` may exceed the rows of requests."""
    return min(_PREFILL_ROWS, max_rows) - 1


_PREFILL_ROWS = 4
_PART = 8  # of many decode rows, "some" are one in so many
_SMALL_PREFILLS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792)
_PREFILL_STEP = 512
_LEAST_WHOLE_STEP = 4096
_FAST_TOTALS = (351, 447, 639, 895)
_LEAST_LARGER = 24  # prompt tokens by which the next size is larger


def _prefill_sizes(most_tokens: int, num_decode: int) -> list[int]:
    """Return numbers of prompt tokens up to the most: few for small steps, then 512 apart, and more from 4,096 on.

    A small step mostly reads weights, so that padding costs little; in a large one each token takes its time. Some are
    chosen so that the step has one of _FAST_TOTALS, decode rows included, unless another is little larger: matrix
    products of 351 tokens take 0.86 of the time of 384, 447 of that of 512, and 639 and 895 0.84 to 0.85 of that of 768
    and 1,024 (8B model, H100). A step whose total is slow has a token less.
    """
    larger = range(_SMALL_PREFILLS[-1] + _PREFILL_STEP // 2, _LEAST_WHOLE_STEP, _PREFILL_STEP)
    regular = [size for size in (*_SMALL_PREFILLS, *larger) if size < most_tokens]
    regular += [*_whole_steps(most_tokens), most_tokens]
    between = [total - num_decode for total in _FAST_TOTALS if total - num_decode > regular[0]]
    for size in between:
        if min((other - size for other in regular if other >= size), default=0) >= _LEAST_LARGER:
            regular.append(size)
    return sorted({size - (size < most_tokens and _is_slow(num_decode + size)) for size in regular})


def _whole_steps(most_tokens: int) -> Iterator[int]:
    """Yield sizes of long prompts' steps below the most, each at most a quarter larger than the one before."""
    size = _LEAST_WHOLE_STEP
    while size < most_tokens:
        yield size
        size += 2 ** (size.bit_length() - 1) // 4


def _is_slow(num_tokens: int) -> bool:
    """Return whether matrix products of one token more or fewer take less time.

    Those of 448 take 15.1 ms, of 447 9.8 and of 449 10.3 (8B model, H100).
    From 320 on that holds of all multiples of 32 that were measured but those of 128, most of all of 416, 448 and 832.
    """
    return 320 <= num_tokens <= 1056 and num_tokens % 32 == 0 and num_tokens % 128 != 0


def _row_numbers(count: int, max_rows: int) -> list[int]:
    """Return up to `count` numbers of rows that grow by a constant factor; the last is `max_rows`.

    So no step computes many times the rows that it has. From 8 on, rounding up to multiples of 8 costs no time.
    """
    if not max_rows:
        return []
    numbers = [round(float(number)) for number in np.geomspace(1, max_rows, count)] if count > 1 else [max_rows]
    return sorted({min(number if number <= 8 else -(-number // 8) * 8, max_rows) for number in numbers})


def pad_tail(
    padded: Sequence[RunningRequest], buffers: StepBuffers, dummy_block: int, shape: StepShape, num_chunks: int
) -> None:
    """Fill the tail of a packed step with padding: tokens, logits and SSM chunks.

    Args:
        num_chunks: SSM chunks of the shape.
    """
    num_rows = len(padded)
    tokens = slice(int(buffers.host("cu_query")[num_rows]), shape.num_tokens)
    for name in ("token_ids", "token_positions"):
        buffers.host_int64(name)[tokens] = 0
    for name, value in (("token_blocks", dummy_block), ("token_offsets", 0)):
        buffers.host(name)[tokens] = value
    if buffers.limits.marks_real_tokens:
        buffers.host("real_tokens")[tokens] = 0
    logits = slice(int(buffers.host("cu_logits")[num_rows]), shape.num_logits)
    for name in ("logit_tokens", "logit_rows"):
        buffers.host(name)[logits] = 0
    for name in ("uniforms", "accept_uniforms", "residual_uniforms"):
        buffers.host(name).view(np.float64)[logits] = 0.0
    if shape.num_prefill_rows:
        written = int(buffers.host("cu_row_chunks")[shape.num_prefill_rows])
        buffers.host("cu_chunks")[written + 1 : num_chunks + 1] = buffers.host("cu_chunks")[written]
        buffers.host("chunk_rows")[written:num_chunks] = 0
        buffers.host("chunk_slots")[written:num_chunks] = PAD_SLOT
