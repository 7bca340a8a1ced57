"""Why a request can never run, found without asking the engine's thread."""

from dataclasses import dataclass

from ..config import CacheConfig
from ..mcore.context import MambaCacheContext
from ..mcore.request_spec import fault_of, packed_ids
from ..policy.request_settings import LogProbSettings, RequestSpec, SamplingSettings
from .backend import GenerationRequest


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The settings that decide whether a request can ever run."""

    config: CacheConfig
    vocab_size: int
    num_blocks: int

    @staticmethod
    def of(context: MambaCacheContext) -> "RequestRules":
        """Return the rules of a context's engine."""
        return RequestRules(context.cache_config, context.shape.vocab_size, context.max_blocks_of_a_request)

    @property
    def max_sequence_length(self) -> int:
        """The most prompt and generated tokens of a request; the last one needs no KV block."""
        return min(self.config.max_sequence_length, self.num_blocks * self.config.block_size_tokens + 1)

    def fault_of(self, request: GenerationRequest) -> str | None:
        """Return why the request can never run, with value, limit and setting; None if it can."""
        try:
            prompt = packed_ids(request.prompt)
        except (OverflowError, TypeError):
            fits = (isinstance(token, int) and -(2**63) <= token < 2**63 for token in request.prompt)
            unfit = next(token for token, does in zip(request.prompt, fits, strict=True) if not does)
            return f"token {unfit!r} in the prompt is outside the vocabulary of {self.vocab_size}"
        spec = RequestSpec(
            request_id=0,
            prompt=prompt,
            max_len=len(request.prompt) + request.max_tokens,
            sampling=SamplingSettings(request.temperature, request.top_k, request.top_p, logits=request.logits),
            log_probs=LogProbSettings(
                request.wants_log_probs,
                not request.computes_prompt,
                request.num_log_probs or 0,
                request.prompt_top_n,
            ),
        )
        return fault_of(spec, self.config, self.vocab_size, self.num_blocks)
