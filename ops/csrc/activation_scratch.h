// Memory for activations on an integer lattice.
#pragma once
#include <cstring>

#include "binding.h"

namespace dasllama {

// Scratch for `rows` rows of x: one piece of memory, cut into the arrays of IntActivation. unit: elements under one d.
struct ActivationScratch {
  int64_t K, units, groups;  // of a row
  Tensor memory;
  IntActivation arrays;

  static int64_t row_bytes(int64_t K, int group, int unit) {
    return K + K / unit * 4 + K / 32 * 4 + K / group * (2 + 4);
  }
  ActivationScratch(const Tensor& like, int64_t rows, int64_t K, int group, int unit)
      : K(K),
        units(K / unit),
        groups(K / group),
        memory(torch::stable::new_empty(like, {rows * row_bytes(K, group, unit)}, ScalarType::Byte)) {
    uint8_t* at = memory.mutable_data_ptr<uint8_t>();
    const auto take = [&](int64_t bytes_per_row) {
      uint8_t* begin = at;
      at += rows * bytes_per_row;
      return begin;
    };
    arrays.q = reinterpret_cast<int8_t*>(take(K));
    arrays.d = reinterpret_cast<float*>(take(K / unit * 4));
    arrays.s = reinterpret_cast<float*>(take(K / 32 * 4));
    arrays.init = reinterpret_cast<int32_t*>(take(K / group * 4));
    arrays.sums = reinterpret_cast<int16_t*>(take(K / group * 2));
  }

  // The arrays of the rows from m on.
  IntActivation from_row(int64_t m) const {
    return {arrays.q + m * K, arrays.d + m * units, arrays.s + m * (K / 32), arrays.sums + m * groups,
            arrays.init + m * groups};
  }
  // Row m becomes row `n` of another scratch for the same type and K.
  void copy_row(int64_t m, const ActivationScratch& other, int64_t n) const {
    const IntActivation to = from_row(m), from = other.from_row(n);
    const auto copy = [](auto* a, const auto* b, int64_t count) {
      std::memcpy(a, b, static_cast<size_t>(count) * sizeof *a);
    };
    copy(to.q, from.q, K);
    copy(to.d, from.d, units);
    copy(to.s, from.s, K / 32);
    copy(to.sums, from.sums, groups);
    copy(to.init, from.init, groups);
  }
};

}  // namespace dasllama
