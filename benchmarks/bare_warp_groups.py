"""Minimal Gluon kernel with two groups of warps, to show that reports of compute-sanitizer are caused by Triton.

    compute-sanitizer --tool racecheck python3 benchmarks/bare_warp_groups.py [--waits]

The groups share only the memory in which Triton passes arguments to the second group. With `--waits`, the warps of the
first group repeatedly wait for each other and exchange numbers in memory of their own.
"""

import argparse

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROUNDS = 8


@gluon.jit
def _write(out, value, number, WARPS: gl.constexpr, ROUNDS: gl.constexpr):
    lane = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    values = value + number + lane
    for _ in range(ROUNDS):
        values += gl.sum(lane, axis=0) - 16 * WARPS * (32 * WARPS - 1)  # adds nothing
    gl.store(out + lane, values)


@gluon.jit
def _bare_kernel(out, value, other, ROUNDS: gl.constexpr):
    number = gl.program_id(0)
    block = out + number * 160
    gl.warp_specialize(
        [(_write, (block, value, number, 4, ROUNDS)), (_write, (block + 128, other, number, 1, ROUNDS))], [1], [40]
    )


def write_in_two_groups(num_programs: int, rounds: int) -> Tensor:
    """Run the kernel and return its output: [num_programs, 160] int32."""
    out = torch.zeros(num_programs, 160, dtype=torch.int32, device="cuda")
    _bare_kernel[(num_programs,)](out, 1000, 5000, rounds, num_warps=4, enable_fp_fusion=True)
    return out


def main() -> None:
    """Run the kernel and check its output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waits", action="store_true", help="let the warps of a group wait for each other")
    out = write_in_two_groups(64, ROUNDS if parser.parse_args().waits else 0).cpu()
    number = torch.arange(64)[:, None]
    assert out[:, :128].equal((1000 + number + torch.arange(128)).int())
    assert out[:, 128:].equal((5000 + number + torch.arange(32)).int())
    print("both groups wrote their values")


if __name__ == "__main__":
    main()
