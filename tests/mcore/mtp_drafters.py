"""Random multi-token prediction (MTP) heads of tiny models, and a drafter that checks what steps store for them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention.interface import AttentionRows
from megatron_mamba_cache.kernels.attention.reference import ReferenceAttention
from megatron_mamba_cache.kernels.sampling.draft_passes import DraftRows
from megatron_mamba_cache.mcore.model_ends import embeddings_of, rotary_of
from megatron_mamba_cache.mcore.model_ranks import ranks_of_process
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.mtp_chain import MTPBatch, MTPChain
from megatron_mamba_cache.mcore.mtp_head import MTPStep, RemoteHead
from megatron_mamba_cache.mcore.self_attention import CachingSelfAttention
from megatron_mamba_cache.models.drafting.mtp_drafter import DraftReceiver, MTPDrafter
from megatron_mamba_cache.models.drafting.mtp_passes import MTPPasses
from megatron_mamba_cache.models.mtp_head import build_mtp_head, head_architecture
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_architecture
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.recurrences.hidden_states import HIDDEN, last_hidden_states
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from megatron_mamba_cache.step.overlapped_step import CapturedStep
from tests.mcore import engine_runs
from tests.mcore.engine_runs import Hybrid

TOLERANCE = 2e-4


@cache
def random_head(sizes: RandomHybridConfig) -> Any:
    """Return a head of random weights for the model of these sizes, or what another pipeline stage has of it.

    It is built once per session, or per parallel layout.
    """
    engine_runs.hybrid(sizes)
    pattern = "*E" if "E" in sizes.pattern else "*-"
    if not ranks_of_process().is_last_stage:
        return RemoteHead(pattern)
    head = build_mtp_head(head_architecture(random_architecture(sizes), pattern), sizes.dtype)
    generator = torch.Generator().manual_seed(len(sizes.pattern))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * values if "norm" in name else 0.3 * values)
    return head


def with_head(subject: Hybrid) -> Hybrid:
    """Return the model with the shape that it has with its random head."""
    return replace(subject, shape=model_shape_of(subject.model, ranks_of_process(), random_head(subject.sizes)))


def packed_tokens(
    starts: Sequence[int],
    lengths: Sequence[int],
    block_table: npt.NDArray[np.int32],
    block_size: int,
    device: torch.device,
) -> MTPBatch:
    """Return a batch of consecutive tokens of each request.

    Args:
        starts, lengths: Position of each request's first token in the batch, and its number of tokens there.
        block_table: [requests, blocks] KV block ids; each request's must cover its last token.
    """
    cu_query = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(cu_query[-1]) + (np.asarray(starts) - cu_query[:-1])[owners]
    kv_lens = tuple(start + length for start, length in zip(starts, lengths, strict=True))

    def sent(values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    return MTPBatch(
        num_tokens=int(cu_query[-1]),
        positions=sent(positions, torch.int64),
        token_blocks=sent(block_table[owners, positions // block_size], torch.int32),
        token_offsets=sent(positions % block_size, torch.int32),
        attention=AttentionRows(
            cu_query=sent(cu_query, torch.int32),
            kv_lengths=sent(np.asarray(kv_lens), torch.int32),
            block_table=sent(block_table, torch.int32),
            query_lens=tuple(lengths),
            kv_lens=kv_lens,
            host_block_table=block_table,
            num_decode_requests=len(lengths) if max(lengths) == 1 else 0,
        ),
    )


def hidden_states_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the hidden states, [tokens, hidden], after the final norm, of a whole sequence without an engine."""
    found: list[Tensor] = []
    handle = model.decoder.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    length = len(tokens)
    hidden_from = ~torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).tril()
    try:
        model(tokens[None], torch.arange(length, device=tokens.device)[None], hidden_from)
    finally:
        handle.remove()
    return found[0].squeeze(1)


def entries_of(chain: MTPChain, model: Any, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the head's keys and values of a whole sequence, [2, layers, tokens, kv heads, head dim]."""
    length = len(tokens)
    layers = [module for module in chain.head.modules() if isinstance(module, CachingSelfAttention)]
    sizes = layers[0].num_query_groups_per_partition, layers[0].hidden_size_per_attention_head
    kv_cache = hidden.new_zeros(2, len(layers), 1, length, *sizes)
    table = torch.zeros(1, 1, dtype=torch.int32).numpy()
    batch = packed_tokens([0], [length], table, length, tokens.device)
    before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    step = MTPStep(batch, kv_cache, ReferenceAttention.plan, length)  # type: ignore[arg-type]  # not called
    embeddings = embeddings_of(model, tokens, batch.positions)
    chain.head.write_entries(embeddings, before, step, rotary_of(model, length))
    return kv_cache[:, :, 0]


class KnownPasses(MTPPasses):
    """Passes whose drafts are replaced on the device, also in CUDA graphs.

    Attributes:
        known: Request id -> token at each position of its text; -1 where the head's draft stays.
        order: Ids of the requests in the rows of `table`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: Mapping[int, Sequence[int]] = {}
        self.order: list[int] = []
        num_rows, device = len(self._hidden), self._hidden.device
        self.table = torch.full((num_rows, self._longest + self._drafts.shape[1] + 1), -1, device=device)

    def draft(
        self,
        requests: Sequence[RunningRequest],
        lengths: Sequence[int],
        least_size: int = 0,
        num_passes: int | None = None,
    ) -> Tensor:
        self._fill(requests)
        return super().draft(requests, lengths, least_size, num_passes)

    def follow(self, graph: CapturedStep, requests: Sequence[RunningRequest]) -> None:
        self._fill(requests)
        super().follow(graph, requests)

    def most_likely(self, hidden: Tensor, rows: DraftRows) -> Tensor:
        known = self.table[: len(hidden)].gather(1, rows.positions[:, None] + 1)[:, 0]
        return torch.where(known >= 0, known, super().most_likely(hidden, rows))

    def _fill(self, requests: Sequence[RunningRequest]) -> None:
        order = [request.request_id for request in requests]
        if order == self.order:
            return
        self.order = order
        self.table.fill_(-1)
        for row, request in enumerate(requests):
            text = torch.tensor(self.text_of(request)[: self.table.shape[1]], dtype=torch.int64)
            self.table[row, : len(text)] = text.to(self.table.device)

    def text_of(self, request: RunningRequest) -> Sequence[int]:
        """Return the entry of `known` for a request."""
        return self.known.get(request.request_id, ())


class CheckedMTPDrafter(MTPDrafter):
    """Drafts with a random head; some calls check the head's entries and hidden states against whole sequences.

    Attributes:
        num_checked: Number of tokens whose entries were checked.
        num_followed: Number of steps that were launched with drafts before the host read the outcome of the last.
        failures: Errors of failed checks, which the engine treats as errors of the drafter.

    Args:
        known: Request id -> tokens that replace those of the head, which are computed nevertheless; see `KnownPasses`.
        share: Share of the requests of a call that are checked; the first of all always is, unless this is 0.
    """

    passes_type = KnownPasses

    def __init__(
        self, subject: Hybrid, *, known: Mapping[int, Sequence[int]] | None = None, share: float = 0.3, seed: int = 0
    ) -> None:
        super().__init__(subject.model, random_head(subject.sizes))
        self.num_checked = self.num_followed = 0
        self.failures: list[AssertionError] = []
        self._model = subject.model
        self._known = known
        self._share = share
        self.checks = share > 0
        self._random = random.Random(seed)

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return almost no time: next to a tiny model, a head would not pay."""
        return 1e-9

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request."""
        self._check_some([request.running for request in requests])
        return super().propose(requests)

    @torch.inference_mode()
    def follow(self, graph: CapturedStep, requests: Sequence[RunningRequest]) -> None:
        """Launch the drafts of the next step."""
        self.num_followed += 1
        self._check_some(requests, is_followed=True)
        super().follow(graph, requests)

    def _passes_here(self) -> MTPPasses:
        passes = super()._passes_here()
        assert isinstance(passes, KnownPasses)
        passes.known = self._known or {}
        return passes

    def _check_some(self, requests: Sequence[RunningRequest], *, is_followed: bool = False) -> None:
        for request in requests:
            if self.checks and (not self.num_checked or self._random.random() < self._share):
                try:
                    self.check(request, is_followed=is_followed)
                except AssertionError as error:
                    self.failures.append(error)
                    raise

    def assert_entries_are_right(self) -> None:
        """Assert that entries were checked, and all were right."""
        assert self.num_checked and not self.failures, self.failures[:1]

    def check(self, request: RunningRequest, *, is_followed: bool = False) -> None:
        """Assert that all computed tokens have the entries of an uncached run, and the last its hidden state.

        Args:
            is_followed: True while a step runs, which has overwritten this hidden state.
        """
        context = self.mtp_chain.context
        device, length = context.memory.kv_buffer.device, request.computed
        tokens = torch.tensor(list(map(int, request.tokens(0, length))), device=device)
        hidden = hidden_states_of(self._model, tokens)
        blocks = torch.tensor(request.block_ids, device=device)
        found = self.mtp_chain.kv_cache[:, :, blocks].flatten(2, 3)[:, :, :length]
        expected = entries_of(self.mtp_chain, self._model, tokens, hidden)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
        self.num_checked += length
        if is_followed:
            return
        at = [[request.cursor.live_slot], [request.cursor.accepted]]
        slots, accepted = torch.tensor(at, dtype=torch.int32, device=device)
        last = last_hidden_states(context.memory.state_pool.hidden_states.live[HIDDEN], slots, accepted)
        torch.testing.assert_close(last[0], hidden[-1], atol=TOLERANCE, rtol=TOLERANCE)


class QuickReceiver(DraftReceiver):
    """Receives drafts from the last pipeline stage, where `CheckedMTPDrafter` drafts."""

    def __init__(self, subject: Hybrid) -> None:
        super().__init__(subject.model)

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return almost no time, like `CheckedMTPDrafter`."""
        return 1e-9
