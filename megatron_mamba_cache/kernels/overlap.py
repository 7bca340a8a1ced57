"""Start each kernel while the previous one still runs, to hide launch latency (programmatic dependent launch).

On Hopper, a kernel may start as soon as every program of the previous kernel allows it. Until it has waited for the
results of that kernel, it may read only weights and must not write. `await_inputs` waits at the start of a kernel. All
kernels that start early also wait, so none overtakes an earlier kernel. Other devices run kernels one after another.

If a kernel calls `await_then_release`, everything that earlier kernels wrote is complete when the next kernel starts.
The next kernel may therefore read anything except this kernel's results immediately, and waits for those results with
`await_launcher`.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as cuda_language

from .kernel_launches import INTERPRETED, is_hopper


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel start, and wait for all earlier writes; call it before any other statement."""
    let_next_begin(OVERLAPS)
    await_written(OVERLAPS)


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let the next kernel start; until `await_written`, this kernel may read only weights."""
    if OVERLAPS:
        cuda_language.gdc_launch_dependents()


@triton.jit
def await_written(OVERLAPS: tl.constexpr):
    """Wait until all writes by earlier kernels are visible."""
    if OVERLAPS:
        cuda_language.gdc_wait()


@triton.jit
def await_then_release(OVERLAPS: tl.constexpr):
    """Wait for all earlier writes, then let the next kernel start; it may read anything but this kernel's results.

    The next kernel must call `release` first, then `await_launcher` before it reads these results or ends.
    """
    if OVERLAPS:
        cuda_language.gdc_wait()
        cuda_language.gdc_launch_dependents()


@triton.jit
def release(OVERLAPS: tl.constexpr):
    """Let the next kernel start, if the previous kernel called `await_then_release`."""
    if OVERLAPS:
        cuda_language.gdc_launch_dependents()


@triton.jit
def await_launcher(OVERLAPS: tl.constexpr):
    """Wait until all results of the previous kernel are written; programs that do not read them must also call it."""
    if OVERLAPS:
        cuda_language.gdc_wait()


@cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Return launch arguments that let a kernel start early on Hopper; elsewhere, OVERLAPS is False."""
    overlaps = device.type == "cuda" and not INTERPRETED and is_hopper(device)
    return {"OVERLAPS": overlaps, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a second stream with high priority, so that its programs start before those queued on other streams."""
    return torch.cuda.Stream(device, priority=-1)
