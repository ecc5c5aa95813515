// A cache tensor [P, G, R, row] and its codec, checked, as kernels take it.
#pragma once
#include "binding.h"

namespace dasllama {

// The dtype of a cache: of plain floats their own, blocks are bytes.
inline ScalarType dtype_of(int64_t codec) {
  return codec == kv::F32 ? ScalarType::Float : codec == kv::F16 ? ScalarType::Half : ScalarType::Byte;
}

// name: of the tensor. dim: elements of a head. Pages must be one run each, however far apart.
inline KVCache checked_cache(const char* op, const char* name, const Tensor& cache, int64_t codec, int64_t dim) {
  STD_TORCH_CHECK(codec >= 0 && codec < kv::count, "dasllama::", op, ": codec ", codec, " of ", name,
                  " is unknown, wanted 0 to ", kv::count - 1);
  const char* codec_name = kv::codecs[codec].name;
  STD_TORCH_CHECK(cache.scalar_type() == dtype_of(codec) && cache.dim() == 4, "dasllama::", op, ": ", name,
                  " must be ", toString(dtype_of(codec)), " [P, G, R, row] for ", codec_name, ", found ",
                  toString(cache.scalar_type()), " of rank ", cache.dim());
  const int64_t size = dtype_of(codec) == ScalarType::Byte ? 1 : kv::codecs[codec].bytes;
  STD_TORCH_CHECK(cache.stride(3) == 1 && cache.stride(2) == cache.size(3) &&
                      cache.stride(1) == cache.size(2) * cache.size(3) &&
                      cache.stride(0) >= cache.size(1) * cache.stride(1),
                  "dasllama::", op, ": ", name, " must have contiguous pages");
  STD_TORCH_CHECK(!kv::codecs[codec].rotated || dim <= kv::most_rotated, "dasllama::", op, ": ", codec_name,
                  " rotates heads of at most ", kv::most_rotated, " elements, found ", dim);
  const KVCache made = kv_cache(const_cast<void*>(cache.const_data_ptr()), static_cast<int>(codec),
                                cache.stride(0) * size, cache.size(1), cache.size(2), dim);
  STD_TORCH_CHECK(cache.size(3) * size == made.row_bytes, "dasllama::", op, ": ", name, " has rows of ",
                  cache.size(3) * size, " bytes, wanted ", made.row_bytes, ": a head of ", dim, " in ", codec_name);
  return made;
}

// slots must be contiguous int64 [T].
inline const int64_t* checked_slots(const char* op, const Tensor& slots) {
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Long && slots.dim() == 1 && slots.is_contiguous(), "dasllama::", op,
                  ": slots must be contiguous int64 [T], found ", toString(slots.scalar_type()), " of rank ",
                  slots.dim());
  return slots.const_data_ptr<int64_t>();
}

// Each of T slots must be -1 or in one of P pages of R rows.
inline void check_slots(const char* op, const int64_t* slots, int64_t T, int64_t P, int64_t R) {
  for (int64_t t = 0; t < T; t++)
    STD_TORCH_CHECK(slots[t] >= -1 && slots[t] < P * R, "dasllama::", op, ": slots[", t, "] is ", slots[t],
                    ", wanted -1 (skip) or less than ", P * R, " (", P, " pages of ", R, " rows)");
}

}  // namespace dasllama
