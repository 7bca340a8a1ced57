"""A model that can be run over a `MambaCacheContext`: what it must be, and Megatron's wrapper around the two."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
from megatron.core.models.mamba import MambaModel
from torch import Tensor

from ..kernels.compilation import WATCH
from .context import MambaCacheContext
from .model_shape import HybridModelShape


def check_served(model: Any) -> HybridModelShape:
    """Return the shape of a model that can be served.

    Raises:
        TypeError: If it is no MambaModel.
        ValueError: If it is no hybrid, lacks the caching modules, captures CUDA graphs or runs on several ranks.
    """
    if not isinstance(model, MambaModel):
        raise TypeError(f"serving needs a MambaModel, found {model!r:.200}")
    _check_one_rank()
    shape = HybridModelShape.of(model)
    if model.config.cuda_graph_impl != "none":
        raise ValueError(f"cuda_graph_impl is {model.config.cuda_graph_impl!r}; only 'none' is supported")
    return shape


def wrap_model(model: Any, context: MambaCacheContext) -> GPTInferenceWrapper:
    """Return Megatron's wrapper that runs the model over the context; the model is put into eval mode.

    What Triton compiles is counted from here on.
    """
    WATCH.install()
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


def compute_step(model: GPTInferenceWrapper, context: MambaCacheContext) -> Tensor:
    """Run a wrapped model's forward over the step that its context has laid out; return the logits, [1, n, vocab]."""
    token_ids, positions = context.current_input_and_position_ids()
    return model.run_one_forward_step({"tokens": token_ids, "position_ids": positions, "attention_mask": None})


def _check_one_rank() -> None:
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
    }
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(f"{name} parallel size is {size}; this version runs a model on one rank only")
