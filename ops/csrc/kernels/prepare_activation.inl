// Rows of x on the lattice of a weight type, taken apart into the arrays that the integer matmul reads: see IntActivation
// in ../kernels.h. The rounding itself is that of quantize.inl.

static void prepare_activation(const float* x, int lattice, IntTraits traits, int64_t K, const IntActivation& a,
                               int64_t begin, int64_t end) {
  const int length = lattice == types::Q8_K ? 256 : 32, groups = length / traits.group;
  const int64_t blocks = K / length;
  for (int64_t at = begin * blocks; at < end * blocks; at++) {
    uint8_t block[292];  // of the longest lattice, Q8_K
    const uint8_t* q;
    if (lattice == types::Q8_K) {
      quantize_256(x + at * 256, 256, block);
      std::memcpy(a.d + at, block, 4);
      q = block + 4;
    } else if (lattice == types::Q8_1) {
      quantize_32<true>(x + at * 32, 32, block);
      a.d[at] = load_f16(block);
      a.s[at] = load_f16(block + 2);
      q = block + 4;
    } else {
      quantize_32<false>(x + at * 32, 32, block);
      a.d[at] = load_f16(block);
      q = block + 2;
    }
    std::memcpy(a.q + at * length, q, length);
    for (int g = 0; g < groups; g++) {
      int32_t sum = 0;
      for (int i = g * traits.group; i < (g + 1) * traits.group; i++) sum += static_cast<int8_t>(q[i]);
      a.sums[at * groups + g] = static_cast<int16_t>(sum);
      a.init[at * groups + g] = -traits.bias * sum;
    }
  }
}
