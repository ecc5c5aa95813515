// Rows of x on the lattice of a weight type, taken apart into the arrays that the integer matmul reads: see IntActivation
// in ../kernels.h. The rounding itself is that of quantize.inl.

// The block `p` of a lattice, which becomes the block `at` of the arrays.
template <int lattice, int group>
static DASLLAMA_INLINE void take_apart(const uint8_t* p, int bias, const IntActivation& a, int64_t at) {
  constexpr int length = type_info(lattice).block, groups = length / group;
  constexpr int head = type_info(lattice).bytes - length - (lattice == types::Q8_K ? 32 : 0);
  int8_t q[length];  // bytes of the arrays may alias the block for all that the compiler knows
  std::memcpy(q, p + head, length);
  int32_t sums[groups];
  if constexpr (lattice == types::Q8_K) {
    std::memcpy(a.d + at, p, 4);
    int16_t of16[16];  // the block has sums of 16
    std::memcpy(of16, p + head + length, sizeof of16);
    for (int g = 0; g < groups; g++) sums[g] = group == 32 ? of16[2 * g] + of16[2 * g + 1] : of16[g];
  } else {
    a.d[at] = load_f16(p);
    if (lattice == types::Q8_1) a.s[at] = load_f16(p + 2);
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

// Blocks [begin, end) of x, which is rows after rows of whole blocks.
template <int lattice, int group>
static void prepare_blocks(const float* x, int bias, const IntActivation& a, int64_t begin, int64_t end) {
  constexpr int length = type_info(lattice).block, bytes = type_info(lattice).bytes, some = 512 / length;
  uint8_t blocks[some * bytes];
  for (int64_t at = begin; at < end; at += some) {
    const int n = static_cast<int>(end - at < some ? end - at : some);
    if constexpr (lattice == types::Q8_K)
      quantize_256(x + at * length, n * length, blocks);
    else
      quantize_32<lattice == types::Q8_1>(x + at * length, n * length, blocks);
    for (int i = 0; i < n; i++) take_apart<lattice, group>(blocks + i * bytes, bias, a, at + i);
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
