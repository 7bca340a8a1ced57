"""A conversation with the shipped model: the prompt of each turn extends the earlier turns."""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.command_line.commands import EDITING
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.mcore.engine import MambaCacheEngine
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer

BLOCK = 64
REPLY_TOKENS = 2 * BLOCK + 12  # longer than what a turn may compute beyond its new text
NEW_TEXTS = (
    "import unittest\n\n\nclass QueueTest(unittest.TestCase):\n\n    def setUp(self):\n        self.queue = Queue()\n",
    "\n    def put(self, item):\n        self.items.append(item)\n\n    def get(self):\n" * 4,
    "\n",
    "\n    def test_empty(self):\n",
    "\n\nclass Queue:\n",
)
SAMPLINGS = {"greedy": {"top_k": 1}, "sampled": EDITING}


@dataclass(slots=True)
class Conversation:
    """A conversation so far, with the prompt and skipped tokens of each turn."""

    sampling: dict[str, float]
    tokens: list[int] = field(default_factory=list)
    new_counts: list[int] = field(default_factory=list)
    computed_counts: list[int] = field(default_factory=list)


@cache
def shipped() -> LoadedModel:
    return load_hugging_face(SHIPPED_MODEL, torch.float32)


def start_engine(num_drafts: int, decode_checkpoints: str = "rolling") -> MambaCacheEngine:
    config = CacheConfig(
        block_size_tokens=BLOCK,
        buffer_size_gb=0.05,
        prefix_caching_mamba_gb=0.05,
        decode_checkpoints=decode_checkpoints,
        num_speculative_tokens=num_drafts,
        max_requests=4,
        max_tokens=1024,
        max_sequence_length=2048,
    )
    return build_engine(shipped().model, config)


def converse(engine: MambaCacheEngine, num_turns: int) -> dict[str, Conversation]:
    """Run a greedy and a sampled conversation concurrently."""
    tokenizer = load_tokenizer(SHIPPED_MODEL, shipped().architecture.vocab_size)
    conversations = {
        name: Conversation(settings, tokenizer.tokenize(f"# file: {name}_queue.py\n\n"))
        for name, settings in SAMPLINGS.items()
    }
    for turn, text in enumerate(NEW_TEXTS[:num_turns]):
        new = tokenizer.tokenize(text)
        reply_tokens = REPLY_TOKENS if turn + 1 < num_turns else 1  # no turn reads the last reply
        take_turn(engine, turn, list(conversations.values()), new, reply_tokens)
    return conversations


def take_turn(
    engine: MambaCacheEngine, turn: int, conversations: list[Conversation], new: list[int], reply_tokens: int
) -> None:
    """Add new text to each conversation, and the reply; note what of the prompt was computed."""
    counters = engine.context.counters
    computed, prompts = counters.prefill_tokens_computed, {}
    for number, conversation in enumerate(conversations):
        conversation.tokens += new
        request_id = turn * len(conversations) + number
        prompts[request_id] = conversation
        settings = SamplingParams(num_tokens_to_generate=reply_tokens, termination_id=-1, **conversation.sampling)
        engine.add_request(request_id, list(conversation.tokens), settings)
    while engine.has_unfinished_requests():
        records = engine.step_modern()["finished_request_records"]
        for request in (record.merge() for record in records):
            conversation = prompts[request.request_id]
            conversation.new_counts.append(len(new))
            prompt_len = len(conversation.tokens)
            conversation.computed_counts.append(prompt_len - engine.cached_tokens(request.request_id))
            conversation.tokens += request.generated_tokens
    # Nothing was computed twice, so what each request did not skip is all that was computed.
    assert counters.requests_evicted == 0
    newest = sum(conversation.computed_counts[-1] for conversation in conversations)
    assert counters.prefill_tokens_computed - computed == newest


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("num_turns", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_later_turn_prefills_new_text_and_at_most_two_blocks(num_turns: int, num_drafts: int) -> None:
    engine = start_engine(num_drafts)
    for name, conversation in converse(engine, num_turns).items():
        assert len(conversation.computed_counts) == num_turns
        turns = list(zip(conversation.computed_counts, conversation.new_counts, strict=True))[1:]
        assert all(computed <= new + 2 * BLOCK for computed, new in turns), (name, turns)
    counters = engine.context.counters
    assert counters.decode_states_published >= 2 * (num_turns - 1) * (REPLY_TOKENS // BLOCK)
    assert (counters.accepted_tokens > 0) == (num_drafts > 0)


def test_turn_without_decode_checkpoints_recomputes_the_last_reply() -> None:
    for conversation in converse(start_engine(0, decode_checkpoints="none"), num_turns=2).values():
        assert conversation.computed_counts[1] > conversation.new_counts[1] + 2 * BLOCK
