// exp, tanh and log(1 + x) in lanes: within 2 units in the last place, the same bits on every instruction set.
//
// The polynomials are minimax fits of our own (Remez): P for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2, relative error
// of exp 8e-9; Q for (tanh(x) / x - 1) / x^2 as a function of x^2 on |x| < 0.625, relative error of tanh 6e-10; L, at
// Chebyshev's nodes, for (atanh(s) / s - 1) / s^2 as a function of s^2 on s <= 1/3, relative error of atanh 1e-9.
#pragma once
#include "lanes.h"

namespace {

// exp(x) of numbers up to 88.72; 0 below -87.33, where the result would be subnormal.
DASLLAMA_INLINE fvec vexp_moderate(fvec x) {
  const fvec log2e = splat<fvec>(0x1.715476p0f), round = splat<fvec>(0x1.8p23f);
  const fvec t = fma(x, log2e, round);  // its lowest bits are n = x / ln(2), rounded
  const fvec n = t - round;
  fvec r = fma(n, splat<fvec>(-0x1.62e43p-1f), x);
  r = fma(n, splat<fvec>(0x1.05c61p-29f), r);
  fvec p = splat<fvec>(0x1.6d754cp-10f);
  p = fma(p, r, splat<fvec>(0x1.120b72p-7f));
  p = fma(p, r, splat<fvec>(0x1.5554b8p-5f));
  p = fma(p, r, splat<fvec>(0x1.5554dcp-3f));
  p = fma(p, r, splat<fvec>(0.5f));
  p = fma(p * r, r, r) + 1.0f;
  const fvec y = (fvec)((ivec)p + ((ivec)t << 23));  // times 2^n
  return select(less(x, splat<fvec>(-87.33f)), fvec{}, y);
}
// exp(x) with infinity above 88.72, and NaN for NaN.
DASLLAMA_INLINE fvec vexp(fvec x) {
  const fvec high = select(less(splat<fvec>(88.722839f), x), splat<fvec>(INFINITY), vexp_moderate(x));
  return select(x == x, high, x);
}

DASLLAMA_INLINE fvec vtanh(fvec x) {
  const ivec sign = (ivec)x & INT32_MIN;
  const fvec a = (fvec)((ivec)x & INT32_MAX), z = x * x;
  fvec q = splat<fvec>(0x1.2d53bp-9f);
  q = fma(q, z, splat<fvec>(-0x1.119cf2p-7f));
  q = fma(q, z, splat<fvec>(0x1.64b22cp-6f));
  q = fma(q, z, splat<fvec>(-0x1.ba096p-5f));
  q = fma(q, z, splat<fvec>(0x1.1110ecp-3f));
  q = fma(q, z, splat<fvec>(-0x1.555556p-2f));
  const fvec small = fma(x * z, q, x);
  const fvec large = 1.0f - 2.0f / (vexp(a + a) + 1.0f);
  return select(less(a, splat<fvec>(0.625f)), small, (fvec)((ivec)large | sign));
}

// log(1 + x) for x in [0, 1]: 2 atanh(s) with s = x / (x + 2).
DASLLAMA_INLINE fvec vlog1p(fvec x) {
  const fvec s = x / (x + 2.0f), z = s * s;
  fvec l = splat<fvec>(0x1.dbe3c8p-4f);
  l = fma(l, z, splat<fvec>(0x1.bc7ed2p-4f));
  l = fma(l, z, splat<fvec>(0x1.24c99ep-3f));
  l = fma(l, z, splat<fvec>(0x1.9998d2p-3f));
  l = fma(l, z, splat<fvec>(0x1.555556p-2f));
  return fma(s + s, l * z, s + s);
}

template <class V>
DASLLAMA_INLINE Two<V> vexp_moderate(Two<V> x) {
  return {vexp_moderate(x.lo), vexp_moderate(x.hi)};
}
template <class V>
DASLLAMA_INLINE Two<V> vexp(Two<V> x) {
  return {vexp(x.lo), vexp(x.hi)};
}
template <class V>
DASLLAMA_INLINE Two<V> vtanh(Two<V> x) {
  return {vtanh(x.lo), vtanh(x.hi)};
}
template <class V>
DASLLAMA_INLINE Two<V> vlog1p(Two<V> x) {
  return {vlog1p(x.lo), vlog1p(x.hi)};
}

// 1 / (1 + exp(-x)).
DASLLAMA_INLINE f32x16 logistic16(f32x16 x) { return splat16(1.0f) / (splat16(1.0f) + vexp(f32x16{} - x)); }

// exp of one number, with the bits of a lane.
DASLLAMA_INLINE float exp_one(float x) { return vexp(splat<fvec>(x))[0]; }
DASLLAMA_INLINE float tanh_one(float x) { return vtanh(splat<fvec>(x))[0]; }

}  // namespace
