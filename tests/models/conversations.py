"""Conversations with a loaded checkpoint, compared with transformers' model token by token.

Each token is compared with what transformers' model scores best after the tokens before it, in one forward pass over
the whole text, and its log probability with that of transformers.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.speculation.drafter import Drafter
from tests.mcore.engine_runs import GIB, EngineRun, greedy
from tests.mcore.split_memory import SplitConfig
from tests.models.reference_run import reference_run
from tests.models.tiny_checkpoints import TinyCheckpoint

TOLERANCE = 2e-4
AMBIGUOUS_MARGIN = 1e-4
AMBIGUOUS_ROUTING = 1e-6
"""Least gap between a token's last expert and the next: below it, either may be chosen, and later tokens differ."""
REPLY = 24
DRAFTS = {"num_speculative_tokens": 3, "adaptive_drafts": False, "draft_states": "window"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint in transformers and as loaded here."""

    case: TinyCheckpoint
    reference: PreTrainedModel
    loaded: LoadedModel

    @staticmethod
    def load(case: TinyCheckpoint, directory: Path) -> "Subject":
        """Write a case's checkpoint into a directory, and load it."""
        reference = reference_run(case).model
        case.write(reference, directory)
        return Subject(case, reference, load_hugging_face(directory, torch.float32))

    def start(
        self, *, kv_blocks: int = 40, cached_states: int = 40, drafter: Drafter | None = None, **settings: Any
    ) -> EngineRun:
        """Build an engine with room for these numbers of blocks and cached states."""
        shape, block = model_shape_of(self.loaded.model), self.case.block_size
        small = {"max_requests": 4, "max_tokens": 256, "max_sequence_length": 640} | settings
        plain = CacheConfig(block_size_tokens=block, **small)
        state = shape.state_layout(plain.resolved()).slot_bytes
        config = SplitConfig(
            block_size_tokens=block,
            cache_gb=2 * ((kv_blocks + 16) * shape.block_bytes(block) + (cached_states + 16) * state) / GIB + 2**-8,
            num_blocks=kv_blocks,
            num_states=cached_states,
            **small,
        )
        return EngineRun(self.loaded, build_engine(self.loaded.model, config, drafter=drafter))

    def assert_as_in_transformers(self, run: EngineRun) -> None:
        """Assert that all tokens and log probabilities of all requests match transformers."""
        num_sure, num_tokens = 0, 0
        for request_id, request in run.finished.items():
            prompt, tokens = run.prompts[request_id], torch.tensor(run.tokens(request_id))
            logits, gaps = self._logits_and_gaps([*prompt, *tokens.tolist()])
            known = (gaps >= AMBIGUOUS_ROUTING).cumprod(0).bool()[len(prompt) - 1 : -1]
            logits = logits[len(prompt) - 1 : -1]
            best = logits.topk(2, dim=-1)
            is_sure = known & (best.values[:, 0] - best.values[:, 1] >= AMBIGUOUS_MARGIN)
            assert tokens[is_sure].equal(best.indices[is_sure, 0]), request_id
            log_probs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            errors = (torch.tensor(request.generated_log_probs) - log_probs).abs()[known]
            assert not len(errors) or errors.max() <= TOLERANCE, request_id
            num_sure, num_tokens = num_sure + int(is_sure.sum()), num_tokens + len(tokens)
        assert num_tokens and num_sure >= 0.9 * num_tokens

    @torch.inference_mode()
    def _logits_and_gaps(self, text: list[int]) -> tuple[Tensor, Tensor]:
        """Return transformers' logits [tokens, vocab], and each token's gap between its last expert and the next."""
        gaps = [torch.ones(len(text))]

        def note(router: nn.Module, _: Any, outputs: tuple[Tensor, ...]) -> None:
            scores = outputs[0].softmax(-1).topk(router.top_k + 1).values
            gaps.append(scores[:, -2] - scores[:, -1])

        modules = self.reference.modules()
        routers = [module for module in modules if type(module).__name__.endswith("TopKRouter")]
        hooks = [router.register_forward_hook(note) for router in routers]
        logits = self.reference(torch.tensor([text])).logits[0]
        for hook in hooks:
            hook.remove()
        return logits, torch.stack(gaps).amin(0)


def converse(subject: Subject, run: EngineRun, num_others: int = 0) -> None:
    """Run two concurrent conversations of three turns, the second branching off the first within a block.

    After each turn, a number of unrelated requests arrive.
    """
    rng, vocab, block = random.Random(7), subject.case.vocab_size, subject.case.block_size
    first = [rng.randrange(vocab) for _ in range(block + 21)]
    texts = [first, [*first[:-9], *(rng.randrange(vocab) for _ in range(30))]]
    for turn in range(3):
        for number, text in enumerate(texts):
            run.add(10 * turn + number, text, asked())
            run.step()
        run.finish()
        for other in range(num_others):
            run.run(10 * turn + 5 + other, [rng.randrange(vocab) for _ in range(4 * block)], asked())
        for number, text in enumerate(texts):
            reply = run.tokens(10 * turn + number)
            text += [*reply, *(rng.randrange(vocab) for _ in range(11)), *reply[:12]]
    run.assert_nothing_held()


def asked() -> Any:
    """Return the settings of a request: a greedy reply with its log probabilities."""
    return greedy(REPLY, return_log_probs=True, skip_prompt_log_probs=True)
