"""exp, tanh and the logistic function to a few units in the last place of f32, on every target.

The hardware's exp2 is accurate for small arguments; Triton's own exp multiplies its argument by log2(e) in f32, which
costs as many bits of the result as the argument has before its point.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x: x = n ln 2 + r with whole n, and e^r = 2^(r log2 e). Infinite above 128 ln 2, zero below -150 ln 2."""
    n = tl.floor(tl.minimum(tl.maximum(x, -110.0), 90.0) * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.428606820309417e-06  # n times the upper bits of ln 2 is exact
    half = tl.floor(n * 0.5)  # two powers, so that neither overflows where the product does not
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def exp_of_negative(x):
    """e^x for x <= 0 in a third of the instructions: 2^y for y = x log2 e, times 1 + what y has lost of the product."""
    x = tl.where(x < -104.0, -104.0, x)  # a NaN stays one
    y = x * 1.4426950408889634
    lost = tl.fma(x, 1.4426950408889634, -y) + x * 1.925963e-08
    p = tl.exp2(y)
    return p + p * (lost * 0.6931471805599453)


@triton.jit
def logistic(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def tanh(x):
    """A series below 0.35, whose next term is 0.004 x^13, and above it (1 - e^-2x) / (1 + e^-2x)."""
    a, s = tl.abs(x), x * x
    e = exp(-2.0 * a)
    large = (1.0 - e) / (1.0 + e)
    c = 0.021869488536155203 - 0.008863235529902197 * s
    c = -0.05396825396825397 + s * c
    c = 0.13333333333333333 + s * c
    c = -0.3333333333333333 + s * c
    return tl.where(a < 0.35, x + x * s * c, tl.where(x < 0, -1.0, 1.0) * large)
