"""From a model and settings to an engine that is ready for requests."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
from megatron.core.models.mamba import MambaModel

from ..config import CacheConfig
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from ..speculation.drafter import Drafter
from ..speculation.prompt_lookup import PromptLookupDrafter
from .context import MambaCacheContext
from .controller import MambaCacheController
from .engine import MambaCacheEngine
from .model_shape import HybridModelShape


class TokenIdTokenizer:
    """Stands in where no tokenizer is given: text is token ids separated by spaces."""

    eod = -1
    bos = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Parse token ids."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        """Print token ids."""
        return " ".join(str(token) for token in tokens)


def _check_one_rank() -> None:
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
    }
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(f"{name} parallel size is {size}; this version runs a model on one rank only")


def build_engine(
    model: Any,
    config: CacheConfig | None = None,
    *,
    drafter: Drafter | None = None,
    tokenizer: Any = None,
    random_seed: int = 0,
    materialize_only_last_token_logits: bool = True,
) -> MambaCacheEngine:
    """Build an engine that serves `model` with prefix caching.

    Args:
        model: A MambaModel built from a spec of `with_mamba_cache`; it is put into eval mode.
        config: Settings of the cache; None takes the defaults.
        drafter: Proposes the tokens that a step verifies; None takes `PromptLookupDrafter` where the settings ask for
            drafts.
        tokenizer: With `tokenize`, `detokenize`, `bos` and `eod`; None: requests speak in token ids.
        random_seed: Seed of requests that bring none.
        materialize_only_last_token_logits: False where requests want prompt log-probs.

    Raises:
        ValueError: If the model is no hybrid, lacks the caching modules, or the settings do not fit it.
        TypeError: If it is no MambaModel, or the settings are no CacheConfig.
    """
    if not isinstance(model, MambaModel):
        raise TypeError(f"build_engine needs a MambaModel, found {model!r:.200}")
    if not isinstance(config, CacheConfig | None):
        raise TypeError(f"build_engine needs a CacheConfig or None, found {config!r:.200}")
    config = config or CacheConfig()
    _check_one_rank()
    shape = HybridModelShape.of(model)
    if model.config.cuda_graph_impl != "none":
        raise ValueError(f"cuda_graph_impl is {model.config.cuda_graph_impl!r}; only 'none' is supported")
    context = MambaCacheContext(
        config,
        shape,
        planner=_planner(config, drafter, shape.vocab_size),
        materialize_only_last_token_logits=materialize_only_last_token_logits,
    )
    controller = MambaCacheController(_wrapped(model, context), tokenizer or TokenIdTokenizer(shape.vocab_size))
    return MambaCacheEngine(controller, context, random_seed)


def _wrapped(model: Any, context: MambaCacheContext) -> GPTInferenceWrapper:
    shape = context.shape
    settings = InferenceWrapperConfig(
        hidden_size=model.config.hidden_size,
        params_dtype=shape.params_dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=shape.vocab_size,
    )
    wrapper = GPTInferenceWrapper(model, settings, context)
    wrapper.prep_model_for_inference()
    return wrapper


def _planner(config: CacheConfig, drafter: Drafter | None, vocab_size: int) -> DraftPlanner | NoDrafts:
    max_drafts = config.num_speculative_tokens
    if max_drafts:
        return DraftPlanner(drafter or PromptLookupDrafter(), max_drafts, vocab_size)
    if drafter is not None:
        raise ValueError("a drafter is given, but num_speculative_tokens is 0; set --num-speculative-tokens")
    return NoDrafts()
