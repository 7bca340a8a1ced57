"""Megatron's linear layers with our products: of one token, and of weights that stay quantized."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from typing_extensions import override

from ..kernels.activations import Activation
from ..kernels.kernel_launches import wants_gradient
from ..kernels.one_token import can_multiply_one_token, multiply_one_token
from ..kernels.quantized.activations import ActivationScheme
from ..kernels.quantized.few_token_gemm import num_counters
from ..kernels.quantized.one_token_gemm import can_multiply_one_quantized_token, multiply_one_quantized_token
from ..kernels.quantized.product import QuantizedPrompts, multiply_quantized
from ..kernels.quantized.quantized_matrix import QuantizedForm, QuantizedMatrix

_ATTRIBUTES = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
"""That Megatron sets on weights of linear layers."""


class PromptTokens:
    """Index of the first prompt token in the step that a model computes. The model's quantized layers share it.

    Attributes:
        first: None between steps, and in steps without prompt tokens.
    """

    def __init__(self) -> None:
        self.first: int | None = None

    @contextmanager
    def beginning_at(self, first: int | None) -> Iterator[None]:
        """Context manager that sets `first` for a forward pass."""
        self.first = first
        try:
            yield
        finally:
            self.first = None


class QuantizableLinear:
    """A linear layer, combined with a class of Megatron's, whose weight stays quantized after `keep_quantized`.

    Attributes:
        weight: [outputs, inputs]; if the layer is quantized, the words of `QuantizedMatrix` of all but the plain rows.
        weight_scales, weight_factors: Of a quantized layer, as in `QuantizedMatrix`.
        plain_weight: [plain rows, inputs]: the last outputs of a quantized layer, which are not quantized.
        form: None if the layer is not quantized.
        prompt_tokens: Prompt tokens whose activations are quantized; None if the layer quantizes none.
        activations: "dynamic" or "static" if the layer quantizes them; None if not. Keys of cached states depend on it.
        activation_scale: [1] float32 from the file; None if scales follow from the activations.
    """

    weight: Any
    weight_scales: nn.Parameter | None
    weight_factors: nn.Parameter | None
    plain_weight: nn.Parameter | None
    form: QuantizedForm | None
    prompt_tokens: PromptTokens | None
    activations: str | None
    activation_scale: nn.Parameter | None
    register_parameter: Callable[[str, nn.Parameter | None], None]

    def begin_plain(self) -> None:
        """Note that the layer is not quantized; called once."""
        self.form = self.prompt_tokens = self.activations = None
        for name in ("weight_scales", "weight_factors", "plain_weight", "activation_scale"):
            self.register_parameter(name, None)

    def keep_quantized(self, form: QuantizedForm, num_plain: int, device: torch.device) -> None:
        """Replace the weight by an undefined quantized one.

        Args:
            num_plain: Last rows that are not quantized.
        """
        outputs, inputs = self.weight.shape
        matrix = form.empty((outputs - num_plain, inputs), device)
        if num_plain:
            plain = torch.empty(num_plain, inputs, dtype=self.weight.dtype, device=device)
            self.plain_weight = frozen(plain)
        self.weight = frozen(matrix.words, like=self.weight)
        self.weight_scales = None if matrix.scales is None else frozen(matrix.scales)
        self.weight_factors = None if matrix.factors is None else frozen(matrix.factors)
        self.form = form
        self.counters = torch.zeros(num_counters(matrix), dtype=torch.int32, device=device)

    def quantize_activations(self, prompt_tokens: PromptTokens, scale: Tensor | None) -> None:
        """Quantize the activations of prompt tokens from now on; `scale` is the file's, None for dynamic scales."""
        self.prompt_tokens = prompt_tokens
        self.activations = "dynamic" if scale is None else "static"
        self.activation_scale = None if scale is None else frozen(scale)

    @property
    def quantized(self) -> QuantizedMatrix | None:
        """The weight without its plain rows; None if it is not quantized."""
        return None if self.form is None else matrix_of(self.form, self.weight, self.weight_scales, self.weight_factors)

    @property
    def exact_matrix(self) -> QuantizedMatrix | None:
        """`quantized` if it is the whole weight and the current step quantizes no tokens for it; otherwise None."""
        matrix = self.quantized
        is_exact = matrix is not None and self.plain_weight is None and self._prompts(matrix) is None
        return matrix if is_exact else None

    @property
    def num_weights(self) -> int:
        """Weights of a quantized layer, plain ones included."""
        matrix, plain = self.quantized, self.plain_weight
        assert matrix is not None
        return prod(matrix.shape) + (0 if plain is None else plain.numel())

    def multiply(self, x: Tensor) -> Tensor:
        """Return the outputs [..., outputs] of a quantized layer."""
        matrix = self.quantized
        assert matrix is not None
        return multiply_quantized(x, matrix, self.counters, self.plain_weight, self._prompts(matrix))

    def can_activate(self, x: Tensor, activation: Activation) -> bool:
        """Return True if `activated` supports x [..., inputs]: one token, whose activations are not quantized."""
        matrix = self.quantized
        if matrix is None:
            return can_multiply_one_token(x, self.weight, activation)
        is_prompt = self.prompt_tokens is not None and self.prompt_tokens.first == 0
        return self.plain_weight is None and not is_prompt and can_multiply_one_quantized_token(x, matrix, activation)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(x @ W.T) [..., outputs] for one token, computed by one kernel."""
        matrix = self.quantized
        if matrix is None:
            return multiply_one_token(x, self.weight, activation)
        return multiply_one_quantized_token(x, matrix, activation)

    def _prompts(self, matrix: QuantizedMatrix) -> QuantizedPrompts | None:
        first = None if self.prompt_tokens is None else self.prompt_tokens.first
        if first is None:
            return None
        columns = None if matrix.scales is None else matrix.block_columns
        return QuantizedPrompts(first, ActivationScheme(columns, self.activation_scale))


class OneTokenColumnLinear(ColumnParallelLinear, QuantizableLinear):
    """Megatron's column-parallel linear with kernels for a single token and for quantized weights."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.begin_plain()

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        return _computed(self, super()._forward_impl, input, weight, args, settings)

    @override
    def sharded_state_dict(self, *args: Any, **settings: Any) -> Any:
        """Return the weight as a sharded tensor; see Megatron's class."""
        check_not_quantized(self.form)
        return super().sharded_state_dict(*args, **settings)


class OneTokenRowLinear(RowParallelLinear, QuantizableLinear):
    """Megatron's row-parallel linear with these kernels; the result is then summed over ranks."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.begin_plain()

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        return _computed(self, super()._forward_impl, input, weight, args, settings)

    @override
    def sharded_state_dict(self, *args: Any, **settings: Any) -> Any:
        """Return the weight as a sharded tensor; see Megatron's class."""
        check_not_quantized(self.form)
        return super().sharded_state_dict(*args, **settings)


def _computed(
    layer: QuantizableLinear,
    by_megatron: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    args: tuple[Any, ...],
    settings: dict[str, Any],
) -> Tensor:
    """Return a layer's product; Megatron computes what has more to it.

    Raises:
        ValueError: If the layer is quantized, and there is more to it.
    """
    if not args and _is_plain(x, weight, settings):
        return product(x, weight) if layer.form is None else layer.multiply(x)
    if layer.form is not None:
        raise ValueError("a quantized layer has neither bias nor gradients, nor tokens on other ranks")
    return by_megatron(x, weight, *args, **settings)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., inputs] @ weight [outputs, inputs].T; a single token uses its own kernel."""
    return multiply_one_token(x, weight) if can_multiply_one_token(x, weight) else F.linear(x, weight)


def _is_plain(x: Tensor, weight: Tensor, settings: dict[str, Any]) -> bool:
    """Return whether the layer is a plain GEMM, without bias, gradient or sequence parallelism."""
    has_others = settings.get("bias") is not None or settings.get("sequence_parallel")
    return not has_others and not wants_gradient(x, weight)


def prompt_tokens_of(model: nn.Module) -> PromptTokens | None:
    """Return what the layers share that quantize the activations of prompt tokens; None without such layers."""
    found = (getattr(module, "prompt_tokens", None) for module in model.modules())
    return next((prompt_tokens for prompt_tokens in found if prompt_tokens is not None), None)


def check_not_quantized(form: QuantizedForm | None) -> None:
    """Raise `ValueError` if a weight cannot be written to a distributed checkpoint."""
    if form is not None:
        raise ValueError(
            "distributed checkpoints have no quantized weights, and this model's are: load it with dequantizes=True"
        )


def matrix_of(form: QuantizedForm, words: Tensor, scales: Tensor | None, factors: Tensor | None) -> QuantizedMatrix:
    """Return parameters of this form as one value."""
    return QuantizedMatrix(words, form.code_bits, scales, factors, form.block_rows, form.block_columns)


def frozen(values: Tensor, like: Tensor | None = None) -> nn.Parameter:
    """Return a parameter without a gradient, with the attributes that Megatron gave another."""
    found = nn.Parameter(values, requires_grad=False)
    for name in _ATTRIBUTES:
        if hasattr(like, name):
            setattr(found, name, getattr(like, name))
    return found
