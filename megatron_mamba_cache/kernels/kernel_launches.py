"""Decide when an op launches its Triton kernel, and query the CUDA device."""

from functools import cache

import torch
import triton
from packaging.version import Version
from torch import Tensor

# Read once: Triton binds a kernel to the interpreter or to the compiler when the kernel's module is imported.
INTERPRETED: bool = triton.knobs.runtime.interpret
_FIRST_TRITON, _TRITON_BEYOND = Version("3.6"), Version("3.10")
_FP32_OR_NARROWER = (torch.float32, torch.bfloat16, torch.float16)


def launches_kernel(tensor: Tensor) -> bool:
    """Return True if an op on `tensor` launches its kernel rather than calling its torch reference."""
    return tensor.is_cuda or INTERPRETED


def is_computed_in_fp32(*tensors: Tensor) -> bool:
    """Return True if every tensor has a dtype for which kernels compute in fp32."""
    return all(tensor.dtype in _FP32_OR_NARROWER for tensor in tensors)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return True if autograd records operations on any of the tensors; no kernel has a backward pass.

    In inference mode nothing is recorded, even where Megatron enables gradients (around its residual adds).
    """
    is_recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return is_recorded and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@cache
def is_hopper(device: torch.device) -> bool:
    """Return True if a CUDA device is a Hopper GPU: compute capability 9."""
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def resident_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many programs a device runs concurrently, given the number per multiprocessor; 2 if interpreted."""
    return per_multiprocessor * num_multiprocessors(device) if device.type == "cuda" else 2


def has_tested_gluon() -> bool:
    """Return True if the Hopper kernels were tested with this Triton release; Gluon is still experimental."""
    return _FIRST_TRITON <= Version(Version(triton.__version__).base_version) < _TRITON_BEYOND
