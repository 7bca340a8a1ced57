"""Drafters of random workloads."""

import random
from typing import Any

from megatron_mamba_cache.speculation.drafter import Drafter
from megatron_mamba_cache.speculation.prompt_lookup import PromptLookupDrafter
from tests.mcore.checked_draft_model import CheckedDraftModel
from tests.mcore.engine_runs import Hybrid, tiny_hybrid
from tests.mcore.mtp_drafters import CheckedMTPDrafter
from tests.mcore.noisy_drafter import NoisyDrafter, noisy_texts
from tests.mcore.random_workloads import (
    Workload,
    run_workload,
    undisturbed,
)

ACCURACIES = (0.0, 0.5, 0.8, 0.95, 1.0)


def make_drafter(rng: random.Random, work: Workload) -> Drafter:
    kind = rng.random()
    if kind < 0.25:
        return PromptLookupDrafter(min_match=rng.choice([1, 2]))
    if kind < 0.5:
        return make_draft_model(rng, work)
    texts = run_workload(undisturbed(work)).texts
    vocab = work.subject.sizes.vocab_size
    return NoisyDrafter(
        texts, accuracy=rng.choice(ACCURACIES), vocab_size=vocab, seed=rng.randrange(1000), varies=rng.random() < 0.5
    )


def make_mtp_drafter(rng: random.Random, work: Workload, share: float = 0.3) -> CheckedMTPDrafter:
    """Return a random head, whose drafts are mostly wrong, or one whose drafts are replaced by mostly right ones.

    Args:
        share: Share of the requests of a call that are checked; 0 in half precision, whose rounding errors are larger.
    """
    if rng.random() < 0.3:
        return CheckedMTPDrafter(work.subject, share=share, seed=rng.randrange(1000))
    texts = run_workload(undisturbed(work)).texts
    vocab, accuracy = work.subject.sizes.vocab_size, rng.choice(ACCURACIES[1:])
    known = noisy_texts(texts, accuracy=accuracy, vocab_size=vocab, seed=rng.randrange(1000))
    return CheckedMTPDrafter(work.subject, known=known, share=share, seed=rng.randrange(1000))


def make_draft_model(rng: random.Random, work: Workload) -> CheckedDraftModel:
    """Return the model itself or a different one, with its own memory, which may be short of everything."""
    sizes = work.subject.sizes
    unlike = {"pattern": "M*", "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1, "seed": 3}
    subject = rng.choice([work.subject, tiny_hybrid(**unlike, vocab_size=sizes.vocab_size)])
    return start_draft_model(rng, work, subject)


def start_draft_model(rng: random.Random, work: Workload, subject: Hybrid, **settings: Any) -> CheckedDraftModel:
    """Return a draft model for a workload, with random values for settings that are not given."""
    block = subject.sizes.ssm_chunk_size * rng.choice([1, 2])
    max_requests = rng.randrange(2, 9)
    chosen = {
        "block_size_tokens": block,
        "max_requests": max_requests,
        "max_tokens": rng.choice([max_requests, 4 * block, 256]),
        "max_sequence_length": work.config.max_sequence_length,
        "num_cuda_graphs": rng.choice([0, 3]),
        "cuda_graph_prefill_tokens": rng.choice([None, 40]),
        "kv_blocks": rng.choice([2, 12, 200]),
        "cached_states": rng.choice([1, 4, 40]),
        "prefix_caching": rng.random() < 0.8,
    }
    return CheckedDraftModel.start(subject, **chosen | settings)
