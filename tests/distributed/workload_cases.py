"""On a rank: random workloads over a model that ranks share."""

import random
from dataclasses import dataclass, replace

from megatron_mamba_cache.speculation.drafter import Drafter
from tests.distributed.rank_models import Layout, parallel
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import FLAVOURS, Workload, make_workload, run_workload

NUM_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What workloads came to on a rank.

    Args:
        texts: Prompt and reply of each request, with drafts and without.
        seen: Counters, likewise.
        decisions: Of each, how many there were and their hash.
    """

    texts: tuple[dict[int, list[int]], dict[int, list[int]]]
    seen: tuple[dict[str, int], dict[str, int]]
    decisions: tuple[tuple[int, ...], tuple[int, ...]]
    num_compared: int
    num_stopped: int


def run_workloads(layout: Layout, flavour: str, seed: int) -> RankOutcome:
    """Run the workload of a flavour and a seed without drafts and with, as the other ranks do.

    Tokens are compared with the oracle's here, plans with the other ranks' before every forward.
    """
    with parallel(layout):
        plain = run_workload(_watched(make_workload(FLAVOURS[flavour], seed)))
        drafted = _watched(make_workload(FLAVOURS[flavour], seed, NUM_DRAFTS))
        texts = run_workload(replace(drafted, config=replace(drafted.config, num_speculative_tokens=0))).texts
        outcomes = plain, run_workload(drafted, _drafter(texts, drafted))
        logs = [outcome.engine.controller.digest.log for outcome in outcomes]
        return RankOutcome(
            texts=tuple(outcome.texts for outcome in outcomes),
            seen=tuple(dict(outcome.seen) for outcome in outcomes),
            decisions=tuple((log.num_noted, *log.fingerprint()) for log in logs),
            num_compared=sum(outcome.tally.num_compared for outcome in outcomes),
            num_stopped=sum(outcome.tally.num_stopped for outcome in outcomes),
        )


def _watched(work: Workload) -> Workload:
    return replace(work, config=replace(work.config, rank_digest_steps=1))


def _drafter(texts: dict[int, list[int]], work: Workload) -> Drafter:
    vocab_size = work.subject.sizes.vocab_size
    return NoisyDrafter(texts, accuracy=0.8, vocab_size=vocab_size, seed=random.Random(len(texts)).randrange(100))
