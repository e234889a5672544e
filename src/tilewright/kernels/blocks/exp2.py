"""exp2 on the FMA units, for chips whose special-function units are the wall.

Cody and Waite: 2^x = 2^floor(x) * 2^frac(x), the second factor by a polynomial on [0, 1).
Source: FlashAttention-4, arXiv 2603.05451, section 3.1. The coefficients minimise the relative
error with p(0) = 1 pinned: 8.8e-5, which bf16 rounds away in all but 1 % of the results.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from tilewright.kernels.blocks.arithmetic import add_rounded_down, fma

COEFFICIENTS = (0.077119089663, 0.227564394474, 0.695146143436, 1.0)  # highest degree first
MAGIC = 12582912.0  # 2^23 + 2^22: adding it leaves floor(x) in the low bits of the mantissa
LOWEST = -127.0  # below, the exponent would wrap around
ONE = 0x3F800000  # the bits of 1.0


def exp2_by_polynomial(x: Float32) -> Float32:
    """2^x for x up to 127; 0 below -126; NaN where x is.

    The factors are multiplied. To add to the exponent's bits would be an instruction less, but make
    a number of a NaN.
    """
    x = Float32(cute.arch.fmax(x, LOWEST, nan=True))
    shifted = add_rounded_down(x, MAGIC)
    fraction = x - (shifted - MAGIC)
    p = Float32(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        p = fma(p, fraction, coefficient)
    power = (shifted.bitcast(Int32) << 23) + ONE
    return p * power.bitcast(Float32)
