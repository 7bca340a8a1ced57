"""A loaded checkpoint served by an engine with its cache on, and the logits of its tokens."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel
from megatron_mamba_cache.step.step import Step
from tests.mcore.engine_runs import EngineRun
from tests.models.reference_run import NUM_GENERATED, ReferenceRun
from tests.models.tiny_checkpoints import TinyCheckpoint

FIRST, REPEAT, BRANCH = range(3)
PROMPT_OF = {FIRST: 0, REPEAT: 0, BRANCH: 1}
"""Request → row of the reference's prompts."""

_STEPS_BEFORE_THE_OTHERS = 9  # the first request has then published its prompt and decodes, next to their prefills


@dataclass(frozen=True, slots=True)
class ServedRun:
    """The engine's results by request."""

    tokens: dict[int, list[int]]
    logits: dict[int, Tensor]  # [generated, vocab], on the CPU
    num_cached: dict[int, int]


def served_config(case: TinyCheckpoint, **settings: Any) -> CacheConfig:
    """Return settings under which an engine serves a few requests of a checkpoint and caches every boundary."""
    limits = {"boundary_stride": 1, "max_requests": 4, "max_sequence_length": 640}
    memory = {"buffer_size_gb": 0.01, "prefix_caching_mamba_gb": 0.01}
    return CacheConfig(**(case.cache_settings | memory | limits | settings))


def some_prompt(case: TinyCheckpoint, length: int, seed: int = 1) -> list[int]:
    """Return a prompt of random tokens."""
    return torch.randint(case.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def full_sequence_logits(loaded: LoadedModel, prompts: Tensor) -> Tensor:
    """Return the logits [batch, prompt, vocab] of a forward pass without an engine, on the CPU."""
    batch, length = prompts.shape
    device = next(loaded.model.parameters()).device
    hidden_from = ~torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    positions = torch.arange(length, device=device).expand(batch, -1)
    with torch.inference_mode():
        return loaded.model(prompts.to(device), positions, hidden_from).cpu()


def served_run(case: TinyCheckpoint, loaded: LoadedModel, reference: ReferenceRun) -> ServedRun:
    """Serve the first prompt and, while it decodes, the same prompt again and a prompt that branches off it."""
    run = EngineRun(loaded, build_engine(loaded.model, served_config(case)))
    logits = _record_logits(run.engine)
    prompts = {request: reference.prompts[index].tolist() for request, index in PROMPT_OF.items()}
    run.add(FIRST, prompts[FIRST], NUM_GENERATED)
    for _ in range(_STEPS_BEFORE_THE_OTHERS):
        run.step()
    run.add(REPEAT, prompts[REPEAT], NUM_GENERATED)
    run.add(BRANCH, prompts[BRANCH], NUM_GENERATED)
    run.finish()
    run.assert_nothing_held()
    return ServedRun(
        tokens={request: run.tokens(request) for request in PROMPT_OF},
        logits={request: torch.stack(logits[request]) for request in PROMPT_OF},
        num_cached={request: run.engine.cached_tokens(request) for request in PROMPT_OF},
    )


def _record_logits(engine: Any) -> dict[int, list[Tensor]]:
    recorded: dict[int, list[Tensor]] = defaultdict(list)
    sample = engine.context.runner._sample

    def record_and_sample(step: Step, logits: Tensor, **settings: bool) -> Tensor:
        for request, row_logits in zip(step.requests, logits.squeeze(0), strict=True):
            if request.samples_this_step:
                recorded[request.request_id].append(row_logits.to("cpu", copy=True))
        return sample(step, logits, **settings)

    engine.context.runner._sample = record_and_sample
    return recorded
