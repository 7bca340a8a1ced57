"""Launch kernels while the previous one still runs, to hide launch latency (programmatic dependent launch).

Hopper lets a kernel begin once every program of the previous kernel has begun. It must wait for that kernel's results
before it reads or writes anything but weights, and `await_inputs` does so first of all. Since each such kernel waits,
none can overtake an earlier one. On other devices nothing changes.

A kernel that lets the next one begin only after its own wait (`await_then_release`) knows that everything before it is
written. So the next kernel may immediately read anything that this kernel does not write, and waits (`await_launcher`)
for the rest.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as cuda_language

from .kernel_launches import INTERPRETED, is_hopper


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, and wait for all earlier writes; call it before anything else."""
    let_next_begin(OVERLAPS)
    await_written(OVERLAPS)


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let the next kernel begin; only weights may be read between this and `await_written`."""
    if OVERLAPS:
        cuda_language.gdc_launch_dependents()


@triton.jit
def await_written(OVERLAPS: tl.constexpr):
    """Wait for all earlier writes."""
    if OVERLAPS:
        cuda_language.gdc_wait()


@triton.jit
def await_then_release(OVERLAPS: tl.constexpr):
    """Wait for inputs, then let the next kernel begin; it may immediately read anything this kernel does not write.

    The next kernel calls `release` first, and `await_launcher` before it reads this kernel's results or ends.
    """
    if OVERLAPS:
        cuda_language.gdc_wait()
        cuda_language.gdc_launch_dependents()


@triton.jit
def release(OVERLAPS: tl.constexpr):
    """Let the next kernel begin; the previous kernel called `await_then_release`."""
    if OVERLAPS:
        cuda_language.gdc_launch_dependents()


@triton.jit
def await_launcher(OVERLAPS: tl.constexpr):
    """Wait until the previous kernel has written everything; every program must call it, even without reads."""
    if OVERLAPS:
        cuda_language.gdc_wait()


@cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments of a kernel that awaits its inputs if OVERLAPS."""
    overlaps = device.type == "cuda" and not INTERPRETED and is_hopper(device)
    return {"OVERLAPS": overlaps, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's second stream, of high priority: its programs start next, not last."""
    return torch.cuda.Stream(device, priority=-1)
