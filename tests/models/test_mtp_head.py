"""A loaded multi-token prediction head computes what an independent oracle does, over prompts and token by token."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention.interface import AttentionShape
from megatron_mamba_cache.kernels.attention.reference import ReferenceAttention
from megatron_mamba_cache.mcore.mtp_chain import MTPChain
from megatron_mamba_cache.mcore.mtp_head import MTPStep
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from tests.mcore.mtp_drafters import packed_tokens
from tests.models.checkpoint_edits import set_fields, tensors_of, write_tensors
from tests.models.mtp_heads import HeadOracle, head_tensors
from tests.models.tiny_checkpoints import tiny_checkpoint

BLOCK, NUM_BLOCKS = 4, 16
LENGTH = 23
TOLERANCE = 2e-5
CASES = [
    *(f"nemotron_h-{index}" for index in (0, 1)),
    *(f"nemotron_h_moe-{index}" for index in (0, 1, 2, 3)),
    *(f"qwen3_5-{index}" for index in (0, 1, 2)),
    *(f"qwen3_5_moe-{index}" for index in (0, 1)),
    *(f"qwen3_next-{index}" for index in (0, 1)),
    "qwen3_5_moe_whole-0",
]


@dataclass(frozen=True, slots=True)
class Head:
    """A loaded head, its oracle and a text with random hidden states, which stand for the model's."""

    loaded: LoadedModel
    oracle: HeadOracle
    token_ids: Tensor
    hidden_states: Tensor  # [tokens, hidden] of the token before each

    def embeddings(self, token_ids: Tensor) -> Tensor:
        return self.loaded.model.embedding.word_embeddings.weight[token_ids]

    def logits(self, hidden_states: Tensor) -> Tensor:
        model = self.loaded.model
        is_tied = model.share_embeddings_and_output_weights
        weight = model.embedding.word_embeddings.weight if is_tied else model.output_layer.weight
        return hidden_states @ weight.T


@pytest.fixture(scope="module", params=CASES)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    """Write a checkpoint with a head, and load both."""
    case, directory = tiny_checkpoint(request.param), tmp_path_factory.mktemp(request.param)
    case.write(case.model(), directory)
    config = case.config.get_text_config()
    tensors = head_tensors(config, seed=len(request.param))
    write_tensors(directory, tensors_of(directory) | tensors)
    if config.model_type == "nemotron_h":
        has_experts = "moe" in config.layers_block_type
        set_fields(directory, mtp_hybrid_override_pattern="*E" if has_experts else "*-", num_nextn_predict_layers=1)
    loaded = load_hugging_face(directory, torch.float32, mtp="required")
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(case.vocab_size, (LENGTH,), generator=generator)
    hidden_states = torch.randn(LENGTH, config.hidden_size, generator=generator)
    hidden_states[0] = 0.0
    device = loaded.model.embedding.word_embeddings.weight.device
    oracle = HeadOracle(config, {name: tensor.to(device) for name, tensor in tensors.items()})
    return Head(loaded, oracle, token_ids.to(device), hidden_states.to(device))


class Requests:
    """Own KV blocks for copies of a text, in a random order, as the engine's would be."""

    def __init__(self, head: Head, num_requests: int = 1) -> None:
        assert head.loaded.mtp is not None
        self.chain = MTPChain(head.loaded.model, head.loaded.mtp)
        self.device = head.token_ids.device
        sizes = head.loaded.architecture.attention
        shape = AttentionShape(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            block_size=BLOCK,
            scale=sizes.head_dim**-0.5,
            dtype=torch.float32,
            device=self.device,
        )
        self._attention = ReferenceAttention(shape)
        num_layers = head.loaded.mtp.pattern.count("*")
        lead, sizes_of_head = (2, num_layers, num_requests * NUM_BLOCKS, BLOCK), (sizes.num_kv_heads, sizes.head_dim)
        self.kv_cache = torch.full((*lead, *sizes_of_head), torch.nan, device=self.device)
        order = np.random.default_rng(0).permutation(num_requests * NUM_BLOCKS).astype(np.int32)
        self.table = order.reshape(num_requests, NUM_BLOCKS)

    def step(self, starts: list[int], lengths: list[int]) -> MTPStep:
        """Return a step of consecutive tokens of each request."""
        batch = packed_tokens(starts, lengths, self.table, BLOCK, self.device)
        return MTPStep(batch, self.kv_cache, self._attention.plan(batch.attention), BLOCK * NUM_BLOCKS)

    def draft(self, token_ids: Tensor, hidden_states: Tensor, positions: list[list[int]]) -> Tensor:
        """Return the drafts, [requests, passes]: each pass reads the token and hidden state of the pass before."""
        drafts = []
        for starts in positions:
            hidden_states = self.chain.outputs(token_ids, hidden_states, self.step(starts, [1] * len(starts)))
            token_ids = self.chain.most_likely(hidden_states)
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)


@torch.inference_mode()
def test_prompt_in_chunks_equals_the_oracle(head: Head) -> None:
    expected = head.oracle.outputs(head.embeddings(head.token_ids), head.hidden_states)
    for chunks in ([LENGTH], [9, 1, 8, 5], [1] * LENGTH):
        requests, start = Requests(head), 0
        for length in chunks:
            part = slice(start, start + length)
            step = requests.step([start], [length])
            found = requests.chain.outputs(head.token_ids[part], head.hidden_states[part], step)
            torch.testing.assert_close(found, expected[part], atol=TOLERANCE, rtol=TOLERANCE)
            start += length


@torch.inference_mode()
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_chained_drafts_equal_the_oracles(head: Head, num_drafts: int) -> None:
    lengths = [5, LENGTH - 1, 12]
    requests = Requests(head, len(lengths))
    tokens = torch.cat([head.token_ids[:length] for length in lengths])
    hidden = torch.cat([head.hidden_states[:length] for length in lengths])
    requests.chain.outputs(tokens, hidden, requests.step([0] * len(lengths), lengths))
    newest, before = head.token_ids[lengths], head.hidden_states[lengths]
    starts = np.array(lengths)
    found = requests.draft(newest, before, [(starts + number).tolist() for number in range(num_drafts)])
    for length, drafts in zip(lengths, found, strict=True):
        assert_best(head, length, drafts)


def assert_best(head: Head, length: int, drafts: Tensor) -> None:
    """Assert that the oracle, too, finds no better drafts after position `length`, each after those before it."""
    token_ids, hidden = head.token_ids[: length + 1], head.hidden_states[: length + 1]
    for draft in drafts:
        output = head.oracle.outputs(head.embeddings(token_ids), hidden)[-1:]
        logits = head.logits(output)[0]
        assert logits[draft] > logits.max() - 1e-4
        token_ids, hidden = torch.cat((token_ids, draft[None])), torch.cat((hidden, output))


@torch.inference_mode()
def test_rewritten_entries_equal_those_of_a_prompt(head: Head) -> None:
    """Entries of drafts are overwritten from verified hidden states; nothing of the drafts remains."""
    length, requests = 10, Requests(head)
    requests.chain.outputs(head.token_ids[:length], head.hidden_states[:length], requests.step([0], [length]))
    newest = slice(length, length + 1)
    requests.draft(head.token_ids[newest], head.hidden_states[newest], [[length], [length + 1], [length + 2]])
    rest = slice(length, LENGTH)
    found = requests.chain.outputs(
        head.token_ids[rest], head.hidden_states[rest], requests.step([length], [LENGTH - length])
    )
    expected = head.oracle.outputs(head.embeddings(head.token_ids), head.hidden_states)[rest]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_entries_of_a_block_depend_on_no_later_token(head: Head) -> None:
    whole, cut = Requests(head), Requests(head)
    for requests, length in ((whole, LENGTH), (cut, 2 * BLOCK)):
        requests.chain.outputs(head.token_ids[:length], head.hidden_states[:length], requests.step([0], [length]))
    blocks = torch.from_numpy(whole.table[0, :2]).long().to(whole.device)
    torch.testing.assert_close(whole.kv_cache[:, :, blocks], cut.kv_cache[:, :, blocks], atol=1e-6, rtol=1e-6)
