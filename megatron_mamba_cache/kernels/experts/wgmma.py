"""Inline PTX for wgmma in Gluon: four warps multiply 64 rows of weights by any multiple of 16 token rows.

Gluon's own wgmma requires the number of token rows to be a power of two: 112 rows would take three calls, each of which
reads the weights from shared memory again. Here the sums for 64 rows of weights are a tuple of tensors [64, 16];
concatenated, their registers are the accumulator of one wgmma.

Gluon does not expose the addresses of its allocations, but larger ones come first: here the rows of the pipeline,
then its weights. `check_addresses` traps if the layout differs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROW_STEP = gl.constexpr(16)
"""Number of token rows per tensor of sums."""
LINE = gl.constexpr(128)
"""Size in bytes of a line in shared memory, which holds 64 bf16 inputs with 128-byte swizzling."""
SUMS_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
"""Layout of a tensor of sums [64, 16]."""
_REGISTERS = gl.constexpr(8)
"""Number of registers per thread for one tensor of sums."""


@gluon.constexpr_function
def _mma_text(OWN, SHARED):
    """Return the PTX code for the wgmma over 64 inputs; `begin_mma` describes its operands."""
    register = 2 * (OWN + SHARED) * _REGISTERS.value
    text, first = "{\n.reg .b32 address;\n", 0
    products = []
    for name, steps in (("own", OWN), ("shared", SHARED)):
        if steps:
            # A matrix descriptor holds address / 16, the stride of 8 lines (1,024 bytes / 16), and the swizzle mode.
            for matrix in (f"{name}_weights", f"{name}_rows"):
                text += f"""
        .reg .b64 {matrix};
        mov.b32 address, global_smem; add.u32 address, address, ${register}; shr.u32 address, address, 4;
        mov.b64 {matrix}, {{address, 0x40000040}};"""
                register += _REGISTERS.value
            last = first + steps * _REGISTERS.value
            sums = ", ".join([f"${i}" for i in range(first, last)])
            products.append(f"""
        wgmma.mma_async.sync.aligned.m64n{16 * steps}k16.f32.bf16.bf16
            {{{sums}}}, {name}_weights, {name}_rows, 1, 1, 1, 0, 0;
        add.u64 {name}_weights, {name}_weights, 2; add.u64 {name}_rows, {name}_rows, 2;""")
            first = last
        else:
            register += 2 * _REGISTERS.value
    return text + "\nwgmma.fence.sync.aligned;" + "".join(4 * products) + "\nwgmma.commit_group.sync.aligned;\n}"


@gluon.constexpr_function
def _constraints(COUNT, NUM_ADDRESSES):
    """Return the asm constraints for COUNT tensors of sums, updated in place, and for NUM_ADDRESSES addresses."""
    registers, of_addresses = COUNT * _REGISTERS.value, NUM_ADDRESSES * _REGISTERS.value
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["r"] * of_addresses)


@gluon.constexpr_function
def _types(COUNT):
    return (gl.float32,) * COUNT


@gluon.jit
def no_sums(COUNT: gl.constexpr):
    """Return a tuple of COUNT zero tensors [64, 16], in which sums are accumulated."""
    return (gl.zeros([64, ROW_STEP], gl.float32, layout=SUMS_LAYOUT),) * COUNT


@gluon.jit
def begin_mma(sums, own_weights, own_rows, shared_weights, shared_rows, OWN: gl.constexpr, SHARED: gl.constexpr):
    """Start one or two asynchronous matmuls over 64 inputs that are added to `sums`; call `await_mma` to use them.

    Args:
        sums: OWN tensors for the group's own 64 rows of weights and 16 * OWN token rows, then SHARED tensors for the
            shared 64 rows of weights and 16 * SHARED token rows.
        own_weights, own_rows, shared_weights, shared_rows: Byte offsets of the operands from the first allocation;
            multiples of 1,024. If OWN or SHARED is 0, its offsets are ignored.
    """
    COUNT: gl.constexpr = OWN + SHARED
    given = sums + (own_weights, own_rows, shared_weights, shared_rows)  # noqa: RUF005 (Gluon unpacks nothing)
    return gl.inline_asm_elementwise(
        _mma_text(OWN, SHARED), _constraints(COUNT, 4), given, _types(COUNT), False, _REGISTERS
    )


@gluon.jit
def await_mma(sums, LEFT: gl.constexpr, COUNT: gl.constexpr):
    """Wait until at most the last LEFT `begin_mma` calls of this warp group are pending; return the COUNT sums."""
    return gl.inline_asm_elementwise(
        f"wgmma.wait_group.sync.aligned {LEFT};", _constraints(COUNT, 0), sums, _types(COUNT), False, _REGISTERS
    )


@gluon.jit
def check_addresses(rows, weights, WEIGHTS_BEGIN: gl.constexpr):
    """Trap unless the allocations [lines, 64] bf16 start at the addresses that `begin_mma` assumes.

    Overwrites both allocations. No barrier is needed: the checking thread itself has written both first entries.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows.store(gl.full(rows.shape, 1, gl.bfloat16, layout=LAYOUT))
    weights.store(gl.full(weights.shape, 2, gl.bfloat16, layout=LAYOUT))
    TEXT: gl.constexpr = """{
        .reg .pred first, same; .reg .b32 thread, address; .reg .b16 row, weight;
        mov.u32 thread, %tid.x; mov.b32 address, global_smem; setp.eq.u32 first, thread, 0; mov.u32 $0, 0;
        @!first bra done;
        ld.shared.b16 row, [address]; add.u32 address, address, $1; ld.shared.b16 weight, [address];
        setp.eq.b16 same, row, 0x3F80; setp.eq.and.b16 same, weight, 0x4000, same;
        @!same trap;
        done:
    }"""
    gl.inline_asm_elementwise(TEXT, "=r,r", [WEIGHTS_BEGIN], gl.int32, False, 1)
