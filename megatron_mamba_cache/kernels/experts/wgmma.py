"""wgmma of weights with any multiple of 16 rows by four warps on a Hopper GPU: PTX in Gluon.

Gluon's own mma has a power of two of rows: 112 would take three, each of which reads the weights from shared memory
again. Here the sums of 64 weights are a tuple of tensors [64, 16], whose registers in turn are those of one wgmma.

Gluon gives no address of its allocations, and puts larger ones first: the rows of the pipeline, then its weights.
`check_addresses` stops a kernel with another layout.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROW_STEP = gl.constexpr(16)
"""Rows of a tensor of sums."""
LINE = gl.constexpr(128)
"""Bytes of a line of shared memory: 64 inputs of a weight or of a row, swizzled by 128 bytes."""
_STEP_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
_REGISTERS = gl.constexpr(8)
"""Of a thread for a tensor of sums."""


@gluon.constexpr_function
def _mma_text(OWN, SHARED):
    """Return the PTX of the wgmma of 64 inputs; the addresses are described at its call."""
    register = 2 * (OWN + SHARED) * _REGISTERS.value
    text, first = "{\n.reg .b32 address;\n", 0
    products = []
    for name, steps in (("own", OWN), ("shared", SHARED)):
        if steps:
            # A matrix descriptor: the address / 16, the 1,024 bytes / 16 of eight lines, and how they are swizzled.
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
    """Return the constraints of COUNT tensors of sums, each kept in its registers, and of as many addresses."""
    registers, of_addresses = COUNT * _REGISTERS.value, NUM_ADDRESSES * _REGISTERS.value
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["r"] * of_addresses)


@gluon.constexpr_function
def _types(COUNT):
    return (gl.float32,) * COUNT


@gluon.jit
def no_sums(COUNT: gl.constexpr):
    """Return zeros: COUNT tensors [64, 16]."""
    return (gl.zeros([64, ROW_STEP], gl.float32, layout=_STEP_LAYOUT),) * COUNT


@gluon.jit
def begin_mma(sums, own_weights, own_rows, shared_weights, shared_rows, OWN: gl.constexpr, SHARED: gl.constexpr):
    """Begin to add one or two matmuls of 64 inputs to sums, which are undefined before `await_mma`.

    Args:
        sums: OWN tensors of 64 weights and 16 * OWN rows, then SHARED tensors of other weights and 16 * SHARED rows.
        own_weights, own_rows, shared_weights, shared_rows: Byte offsets from the first allocation to the first line of
            each; multiples of 1,024. Those of a matmul without tensors are ignored.
    """
    COUNT: gl.constexpr = OWN + SHARED
    given = sums + (own_weights, own_rows, shared_weights, shared_rows)  # noqa: RUF005 (Gluon unpacks nothing)
    return gl.inline_asm_elementwise(
        _mma_text(OWN, SHARED), _constraints(COUNT, 4), given, _types(COUNT), False, _REGISTERS
    )


@gluon.jit
def await_mma(sums, LEFT: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT sums once all of this group's wgmma have ended but those begun by its last LEFT calls."""
    return gl.inline_asm_elementwise(
        f"wgmma.wait_group.sync.aligned {LEFT};", _constraints(COUNT, 0), sums, _types(COUNT), False, _REGISTERS
    )


@gluon.jit
def check_addresses(rows, weights, WEIGHTS_BEGIN: gl.constexpr):
    """Stop the kernel unless these allocations [lines, 64] bf16 begin where `begin_mma` expects them.

    Overwrites them. The thread that checks either's first entry has written it.
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
