"""Functions shared by Gluon kernels: copies to shared memory, barriers, and Gluon versions of those in `overlap`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Gluon is experimental, and names differ between releases: Triton 3.9's comes first, then Triton 3.6's.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_gathered = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def release(OVERLAPS: gl.constexpr):
    """Let the next kernel start."""
    if OVERLAPS:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def await_launcher(OVERLAPS: gl.constexpr):
    """Wait for the results of the previous kernel."""
    if OVERLAPS:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_then_release(OVERLAPS: gl.constexpr):
    """Wait for the results of the previous kernel, then let the next one begin."""
    await_launcher(OVERLAPS)
    release(OVERLAPS)
