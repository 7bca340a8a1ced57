"""A Gluon kernel of nothing but two groups of warps: what compute-sanitizer says of it, it says of Triton.

    compute-sanitizer --tool racecheck python3 benchmarks/bare_warp_groups.py

Neither group touches shared memory; what racecheck finds here is how Triton hands arguments to the second one.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _write(out, value, number, WARPS: gl.constexpr):
    lane = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.store(out + lane, value + number + lane)


@gluon.jit
def _bare_kernel(out, value, other):
    number = gl.program_id(0)
    block = out + number * 160
    gl.warp_specialize([(_write, (block, value, number, 4)), (_write, (block + 128, other, number, 1))], [1], [40])


def write_in_two_groups(num_programs: int) -> Tensor:
    """Run the kernel: [num_programs, 160] int32."""
    out = torch.zeros(num_programs, 160, dtype=torch.int32, device="cuda")
    _bare_kernel[(num_programs,)](out, 1000, 5000, num_warps=4)
    return out


def main() -> None:
    """Run it and check what it wrote."""
    out = write_in_two_groups(64).cpu()
    number = torch.arange(64)[:, None]
    assert out[:, :128].equal((1000 + number + torch.arange(128)).int())
    assert out[:, 128:].equal((5000 + number + torch.arange(32)).int())
    print("both groups wrote what they were told")


if __name__ == "__main__":
    main()
