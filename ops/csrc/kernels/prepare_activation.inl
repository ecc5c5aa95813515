// Rows of x on the lattice of a weight type, taken apart into the arrays that the integer matmul reads: see IntActivation
// in ../kernels.h. The rounding itself is that of quantize.inl.

// Blocks [begin, end) of x, which is rows after rows of whole blocks.
template <int lattice, int group>
static void prepare_blocks(const float* x, int bias, const IntActivation& a, int64_t begin, int64_t end) {
  constexpr int length = type_info(lattice).block, groups = length / group;
  for (int64_t at = begin; at < end; at++) {
    uint8_t block[type_info(lattice).bytes];
    int8_t q[length];
    int32_t sums[groups];
    if constexpr (lattice == types::Q8_K) {
      quantize_256(x + at * length, length, block);
      std::memcpy(a.d + at, block, 4);
      std::memcpy(q, block + 4, length);
      for (int g = 0; g < groups; g++) {  // the block has sums of 16
        int16_t of16[group / 16];
        std::memcpy(of16, block + 260 + g * sizeof of16, sizeof of16);
        sums[g] = 0;
        for (const int16_t sum : of16) sums[g] += sum;
      }
    } else {
      constexpr bool with_sum = lattice == types::Q8_1;
      quantize_32<with_sum>(x + at * length, length, block);
      a.d[at] = load_f16(block);
      if (with_sum) a.s[at] = load_f16(block + 2);
      std::memcpy(q, block + (with_sum ? 4 : 2), length);
      for (int g = 0; g < groups; g++) {
        sums[g] = 0;
        for (int i = 0; i < group; i++) sums[g] += q[g * group + i];
      }
    }
    std::memcpy(a.q + at * length, q, length);
    for (int g = 0; g < groups; g++) {
      a.sums[at * groups + g] = static_cast<int16_t>(sums[g]);
      a.init[at * groups + g] = -bias * sums[g];
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
