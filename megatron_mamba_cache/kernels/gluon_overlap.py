"""What `overlap` has for kernels in Triton, for those in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def release(OVERLAPS: gl.constexpr):
    """Let the next kernel begin."""
    if OVERLAPS:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def await_launcher(OVERLAPS: gl.constexpr):
    """Wait for the results of the kernel before this one."""
    if OVERLAPS:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_then_release(OVERLAPS: gl.constexpr):
    """Wait for the results of the kernel before this one, and only then let the next one begin."""
    await_launcher(OVERLAPS)
    release(OVERLAPS)
