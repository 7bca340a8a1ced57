"""log(1 + x) inside kernels, accurate for small x too; Triton's language has none."""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """Return log(1 + x) for x in [0, 1], float32, to a few units in the last place.

    The rounding of 1 + x is undone by the quotient (Kahan; HP-15C Advanced Functions Handbook, 1982, appendix).
    """
    sum_ = 1.0 + x
    is_one = sum_ == 1.0
    return tl.where(is_one, x, x * tl.log(sum_) / tl.where(is_one, 1.0, sum_ - 1.0))
