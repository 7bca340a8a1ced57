"""Check that a model can be served, and wrap it for Megatron's controller."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.mamba import MambaModel
from torch import Tensor
from typing_extensions import override

from ..kernels.compilation import WATCH
from ..ranks.group import Ranks, on_all_ranks
from ..recurrences.model_shape import HybridModelShape
from ..step.model import WeightAddresses
from .context import MambaCacheContext
from .expert_layer import check_expert_layers, exchange_of
from .linear import prompt_tokens_of
from .local_spec import LocalHybridStack
from .model_ends import logits_of
from .model_reading import model_shape_of
from .mtp_chain import MTPChain
from .mtp_head import MTPHead


class PipelineStage:
    """Transfers between a pipeline stage and its neighbors; its methods do nothing if there is only one stage.

    Args:
        model: This stage's part of a MambaModel.
    """

    def __init__(self, model: Any, context: MambaCacheContext) -> None:
        self._model = model
        self._is_first, self._is_last = context.ranks.is_first_stage, context.ranks.is_last_stage
        shape = (0 if self._is_first else context.max_tokens, 1, model.config.hidden_size)
        self._input = torch.zeros(shape, dtype=context.shape.params_dtype, device=torch.cuda.current_device())

    def prepare_input(self, num_tokens: int) -> None:
        """Set the model's input to the buffer that `receive` writes, [tokens, 1, hidden]."""
        if not self._is_first:
            self._model.set_input_tensor(self._input[:num_tokens])

    def receive(self, num_tokens: int) -> None:
        """Receive the previous stage's hidden states into the model's input buffer."""
        if not self._is_first:
            before = parallel_state.get_pipeline_model_parallel_prev_rank()
            dist.recv(self._input[:num_tokens], before, group=parallel_state.get_pipeline_model_parallel_group())

    def send(self, output: Tensor) -> None:
        """Send the output of the forward pass, [tokens, 1, hidden], to the next stage."""
        if not self._is_last:
            after = parallel_state.get_pipeline_model_parallel_next_rank()
            dist.send(output.contiguous(), after, group=parallel_state.get_pipeline_model_parallel_group())


_LOG = logging.getLogger(__name__)


class HybridInferenceWrapper(GPTInferenceWrapper):
    """Megatron's model wrapper with pipeline transfers outside the captured forward pass."""

    def __init__(
        self, model: Any, settings: InferenceWrapperConfig, context: MambaCacheContext, chain: MTPChain | None
    ) -> None:
        super().__init__(model, settings, context)
        self._chain = chain
        self.stage = PipelineStage(model, context)
        self._exchange = exchange_of(model)
        self._prompt_tokens = prompt_tokens_of(model)

    @override
    @torch.inference_mode()
    def run_one_forward_step(self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None) -> Tensor:
        """Return logits, [1, n, vocab], on the last stage, and hidden states, [tokens, 1, hidden], on the others."""
        num_tokens = inference_input["tokens"].shape[1]
        self.stage.receive(num_tokens)
        output = self._compute(inference_input)
        self.stage.send(output)
        return output

    def compute_step(self) -> Tensor:
        return self.run_one_forward_step(self._inputs())

    def compute_part(self) -> Tensor:
        return self._compute(self._inputs())

    def receive(self, num_tokens: int) -> None:
        self.stage.receive(num_tokens)

    def send(self, output: Tensor) -> None:
        self.stage.send(output)

    def resuming_exchanges(self) -> AbstractContextManager[bool]:
        return nullcontext(False) if self._exchange is None else self._exchange.resuming()

    def weight_addresses(self) -> WeightAddresses:
        return WeightAddresses.of(self.model, None if self._chain is None else self._chain.head)

    def tables_read(self) -> AbstractContextManager[list[Tensor]]:
        return _rotary_tables_of(self.model)

    def logits_of(self, hidden_states: Tensor) -> Tensor:
        """Return the logits, [n, vocab], for the last layer's outputs, [n, hidden]; only on the last stage."""
        return logits_of(self.model, hidden_states)

    def use_memory(self) -> None:
        """Give the model's MTP head the memory of this engine, which may have been suspended; see `MTPChain.use`."""
        if self._chain is not None:
            self._chain.use(self.inference_context)

    def _compute(self, inference_input: dict[str, Any]) -> Tensor:
        self.stage.prepare_input(inference_input["tokens"].shape[1])
        with nullcontext() if self._exchange is None else self._exchange.counted(), self._marking_prompts():
            output: Tensor = self._forward(inference_input)
            if self._chain is not None:
                self._chain.write_entries()
        self.inference_context.step.end_forward()
        return output

    def _marking_prompts(self) -> AbstractContextManager[None]:
        """Return a context in which quantized layers know the index of the step's first prompt token."""
        if self._prompt_tokens is None:
            return nullcontext()
        batch = self.inference_context.step.batch
        return self._prompt_tokens.beginning_at(None if batch.prefill is None else batch.num_decode_tokens)

    def _inputs(self) -> dict[str, Any]:
        token_ids, positions = self.inference_context.current_input_and_position_ids()
        return {"tokens": token_ids, "position_ids": positions, "attention_mask": None}


def check_served(model: Any, ranks: Ranks, longest: int, head: MTPHead | None = None) -> HybridModelShape:
    """Check that a model can be served and return its shape; all its ranks must call this.

    An error is raised on all ranks, even if only one rank's part cannot be served.

    Args:
        longest: Maximum number of tokens per request.
        head: As in `model_shape_of`.

    Raises:
        TypeError: If the model is not a MambaModel.
        ValueError: If the model is not a hybrid, lacks the caching modules, captures CUDA graphs itself, uses sequence
            parallelism, has hidden states with more than one dtype, or has too few position embeddings.
    """
    on_all_ranks(ranks, lambda: _check_part(model, ranks.num_stages, longest))
    if longest > model.max_sequence_length:
        _LOG.warning(
            "requests may have %d tokens, but the model has %d positions: text after the last position may be noise; "
            "set max_sequence_length (--max-model-len) to %d or less",
            *(longest, model.max_sequence_length, model.max_sequence_length),
        )
    return model_shape_of(model, ranks, head)


def _check_part(model: Any, num_stages: int, longest: int) -> None:
    if not isinstance(model, MambaModel):
        raise TypeError(f"model must be a MambaModel, found {model!r:.200}")
    if model.config.cuda_graph_impl != "none":
        raise ValueError(f"cuda_graph_impl is {model.config.cuda_graph_impl!r}; only 'none' is supported")
    if model.config.sequence_parallel:
        raise ValueError(
            "sequence_parallel is True, but ranks cannot evenly split a step with an arbitrary number of tokens: build "
            "the model with sequence_parallel=False; its weights are the same"
        )
    is_mixed = model.config.fp32_residual_connection and model.config.params_dtype is not torch.float32
    if is_mixed and (num_stages > 1 or isinstance(model.decoder, LocalHybridStack)):
        raise ValueError(
            f"fp32_residual_connection is True, but layers and stages exchange {model.config.params_dtype} tensors: "
            "build the model with fp32_residual_connection=False; its weights are the same"
        )
    if model.position_embedding_type == "learned_absolute" and model.max_sequence_length < longest:
        raise ValueError(
            f"the model has embeddings for {model.max_sequence_length} positions, but a request may have {longest} "
            f"tokens; set max_sequence_length={model.max_sequence_length}"
        )
    check_expert_layers(model)


def wrap_model(model: Any, context: MambaCacheContext, chain: MTPChain | None = None) -> HybridInferenceWrapper:
    """Put the model into eval mode and return Megatron's wrapper for it; also start recording Triton compilations.

    Args:
        chain: The model's MTP head, with which the context was built; it uses the context from now on.
    """
    WATCH.install()
    shape = context.shape
    settings = InferenceWrapperConfig(
        hidden_size=model.config.hidden_size,
        params_dtype=shape.params_dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=shape.vocab_size,
    )
    wrapper = HybridInferenceWrapper(model, settings, context, chain)
    wrapper.prep_model_for_inference()
    wrapper.use_memory()
    return wrapper


@contextmanager
def _rotary_tables_of(model: Any) -> Iterator[list[Tensor]]:
    """Context manager that collects the rotary tables that forward passes in its body read.

    Megatron caches only the 32 newest tables over all models, so later forward passes could free a table that a CUDA
    graph still reads.
    """
    tables: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda _module, _inputs, table: tables.append(table))
        for module in model.modules()
        if isinstance(module, RotaryEmbedding)
    ]
    try:
        yield tables
    finally:
        for handle in handles:
            handle.remove()
