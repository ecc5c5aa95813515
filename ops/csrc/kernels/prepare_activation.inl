// Rows of x on the lattice of a weight type, taken apart into the arrays that the integer matmul reads: see IntActivation
// in ../kernels.h. The rounding itself is that of quantize.inl.

// Blocks [begin, end) of x, which is rows after rows of whole blocks.
template <int lattice, int group>
static void prepare_blocks(const float* x, int bias, const IntActivation& a, int64_t begin, int64_t end) {
  constexpr int length = type_info(lattice).block, groups = length / group;
  for (int64_t at = begin; at < end; at++) {
    const auto keep_sums = [&](const int32_t* of16) __attribute__((always_inline)) {
      for (int g = 0; g < groups; g++) {
        const int32_t sum = group == 32 ? of16[2 * g] + of16[2 * g + 1] : of16[g];
        a.sums[at * groups + g] = static_cast<int16_t>(sum);
        a.init[at * groups + g] = -bias * sum;
      }
    };
    if constexpr (lattice == types::Q8_K) {
      const Lattice256 block = to_lattice_256(x + at * length, a.q + at * length);
      a.d[at] = block.d;
      keep_sums(block.sums);
    } else {
      const Lattice32 block = to_lattice_32(x + at * length, a.q + at * length);
      a.d[at] = widen_f16(block.d_bits());
      if constexpr (lattice == types::Q8_1) a.s[at] = widen_f16(block.s_bits());
      keep_sums(block.sums);
    }
  }
}

static void prepare_activation(const float* x, int lattice, IntTraits traits, int64_t K, const IntActivation& a,
                               int64_t begin, int64_t end) {
  const auto prepare = [&](auto of_group32, auto of_group16) {
    const int64_t blocks = K / type_info(lattice).block;
    (traits.group == 32 ? of_group32 : of_group16)(x, traits.bias, a, begin * blocks, end * blocks);
  };
  switch (lattice) {
    case types::Q8_0: return prepare(prepare_blocks<types::Q8_0, 32>, prepare_blocks<types::Q8_0, 16>);
    case types::Q8_1: return prepare(prepare_blocks<types::Q8_1, 32>, prepare_blocks<types::Q8_1, 16>);
    case types::Q8_K: return prepare(prepare_blocks<types::Q8_K, 32>, prepare_blocks<types::Q8_K, 16>);
  }
}
