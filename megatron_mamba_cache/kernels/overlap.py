"""Kernels that are launched while the kernel before them still runs, so that no pause lies between two short ones.

Hopper lets a kernel begin once every program of the kernel before it has begun (programmatic dependent launch). It must
wait for that kernel's results before it reads or writes anything but weights, and `await_inputs` does so first of all.
Since each such kernel waits, none can overtake one further back. On other devices nothing changes.

A kernel that lets the next one begin only after its own wait (`await_then_release`) has everything before it written by
then. The next kernel may therefore read at once what only those wrote, and waits (`await_launcher`) for the rest.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as cuda_language

from .kernel_launches import INTERPRETED, is_hopper


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, and wait until all that came before has been written; call it before anything else."""
    let_next_begin(OVERLAPS)
    await_written(OVERLAPS)


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let the next kernel begin; only weights may be read between this and `await_written`."""
    if OVERLAPS:
        cuda_language.gdc_launch_dependents()


@triton.jit
def await_written(OVERLAPS: tl.constexpr):
    """Wait until all that came before has been written."""
    if OVERLAPS:
        cuda_language.gdc_wait()


@triton.jit
def await_then_release(OVERLAPS: tl.constexpr):
    """As `await_inputs`, but let the next kernel begin only now: it may read what this kernel does not write at once.

    The next kernel calls `release` first, and `await_launcher` before it reads this kernel's results or ends.
    """
    if OVERLAPS:
        cuda_language.gdc_wait()
        cuda_language.gdc_launch_dependents()


@triton.jit
def release(OVERLAPS: tl.constexpr):
    """Let the next kernel begin; the kernel before this one began with `await_then_release`."""
    if OVERLAPS:
        cuda_language.gdc_launch_dependents()


@triton.jit
def await_launcher(OVERLAPS: tl.constexpr):
    """Wait until the kernel before this one has written all; every program must, even one that reads nothing of it."""
    if OVERLAPS:
        cuda_language.gdc_wait()


@cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments of a kernel that awaits its inputs if OVERLAPS."""
    overlaps = device.type == "cuda" and not INTERPRETED and is_hopper(device)
    return {"OVERLAPS": overlaps, "launch_pdl": True} if overlaps else {"OVERLAPS": False}
