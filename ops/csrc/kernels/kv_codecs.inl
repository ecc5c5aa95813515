// Rows of a head into a cache and back, for every codec of ../kv_codecs.h.
//
//   q8_0  blocks of 32: f16 d, int8 q[32]; d = max|x| / 127, q = x times the unrounded 1 / d; x ~ d * q
//   tq4   the rotated head in blocks of 32: f16 d, 16 bytes, of which byte i holds the codes of elements 2 i (low) and
//         2 i + 1; d = (the element of largest magnitude) / -8, code = min(15, int(x / d + 8.5)); x ~ d * (code - 8)
//
// All but f32 take a value beyond f16's range as +-65504; NaN stays NaN, in q8_0 for its block, in tq4 for its head.

// Between -most and most; NaN stays NaN.
DASLLAMA_INLINE f32x16 clamped(f32x16 v, float most) {
  const f32x16 top = splat16(most), bottom = splat16(-most);
  return select(less(top, v), top, select(less(v, bottom), bottom, v));
}
constexpr float kMostF16 = 65504;

template <class T>
static void write_floats(const float* x, int64_t n, T* out) {
  by_sixteen(0, n, [&](int64_t d, auto m) {
    f32x16 v = take16(x + d, m);
    if constexpr (!std::is_same_v<T, float>) v = clamped(v, kMostF16);
    if (m == 16)
      store16(out + d, v);
    else
      store16(out + d, v, m);
  });
}

// Elements [begin, begin + n) of D, zeros after the last; clamped.
static void pad(const float* x, int64_t D, int64_t begin, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = D - begin - i;
    const f32x16 v = left >= 16 ? load16(x + begin + i) : left > 0 ? load16(x + begin + i, left) : f32x16{};
    store16(out + i, clamped(v, kMostF16));
  }
}

static void write_q8_0(const float* x, int64_t D, uint8_t* out) {
  alignas(64) float block[32];
  for (int64_t at = 0; at < D; at += 32, out += 34) {
    pad(x, D, at, 32, block);
    pack_q8_0(block, out);
  }
}

static void write_tq4(const float* x, int64_t D, int64_t width, uint8_t* out) {
  alignas(64) float head[kv::most_rotated];
  pad(x, D, 0, width, head);
  rotate(head, width);
  for (int64_t at = 0; at < width; at += 32, out += 18) {
    float* block = head + at;
    for (int i = 0; i < 32; i += 16) store16(block + i, clamped(load16(block + i), 8 * kMostF16));  // what d can hold
    uint8_t q[32];
    store_u16(out, f32_to_f16(to_nibbles(block, q)));
    for (int i = 0; i < 16; i++) out[2 + i] = static_cast<uint8_t>(q[2 * i] | q[2 * i + 1] << 4);
  }
}

static void kv_write(const float* x, int64_t row_stride, int64_t head_stride, const int64_t* slots, const KVCache& cache,
                     int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    if (slots[t] < 0) continue;
    for (int64_t h = 0; h < cache.G; h++) {
      const float* in = x + t * row_stride + h * head_stride;
      char* out = cache.row(slots[t] / cache.R, h, slots[t] % cache.R);
      switch (cache.codec) {
        case kv::F32: write_floats(in, cache.D, reinterpret_cast<float*>(out)); break;
        case kv::F16: write_floats(in, cache.D, reinterpret_cast<f16*>(out)); break;
        case kv::Q8_0: write_q8_0(in, cache.D, reinterpret_cast<uint8_t*>(out)); break;
        case kv::TQ4: write_tq4(in, cache.D, cache.width, reinterpret_cast<uint8_t*>(out)); break;
      }
    }
  }
}

// One of the two codes of each byte.
template <int i>
struct one_nibble {
  nibble_pair pair;
};

// Half of a block of 32, as `take` takes it.
template <int i, class T>
DASLLAMA_INLINE auto half_of(const T* block) {
  if constexpr (std::is_same_v<T, nibble_pair>)
    return reinterpret_cast<const one_nibble<i>*>(block);
  else
    return block + 16 * i;
}

// S times 16 consecutive elements, or the codes of a block of tq4 less 8: the lower ones, then the upper ones.
template <int S, class T>
DASLLAMA_INLINE void take(const T* p, f32x16 (&values)[S]) {
  if constexpr (std::is_same_v<T, nibble_pair>) {
    load_nibbles(p, values[0], values[1]);
  } else if constexpr (std::is_same_v<T, one_nibble<0>> || std::is_same_v<T, one_nibble<1>>) {
    f32x16 both[2];
    load_nibbles(&p->pair, both[0], both[1]);
    values[0] = both[std::is_same_v<T, one_nibble<1>>];
  } else {
#pragma GCC unroll 4
    for (int c = 0; c < S; c++) values[c] = load16(p + 16 * c);
  }
}

template <class T>
static void read_floats(const T* row, int64_t n, float* out) {
  by_sixteen(0, n, [&](int64_t d, auto m) { put16(out + d, m == 16 ? load16(row + d) : load16(row + d, m), m); });
}

static void read_q8_0(const uint8_t* row, int64_t D, float* out) {
  for (int64_t at = 0; at < D; at += 32, row += 34) {
    const float d = load_f16(row);
    for (int64_t i = 0; i < 32 && at + i < D; i++) out[at + i] = d * static_cast<float>(static_cast<int8_t>(row[2 + i]));
  }
}

static void read_tq4(const uint8_t* row, int64_t D, int64_t width, float* out) {
  alignas(64) float head[kv::most_rotated];
  for (int64_t at = 0; at < width; at += 32, row += 18) {
    const float d = load_f16(row);
    for (int i = 0; i < 16; i++) {
      head[at + 2 * i] = d * static_cast<float>((row[2 + i] & 15) - 8);
      head[at + 2 * i + 1] = d * static_cast<float>((row[2 + i] >> 4) - 8);
    }
  }
  rotate_back(head, width);
  std::memcpy(out, head, static_cast<size_t>(D) * sizeof(float));
}

static void kv_read(const KVCache& cache, const int64_t* slots, float* out, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++)
    for (int64_t h = 0; h < cache.G; h++) {
      float* to = out + (t * cache.G + h) * cache.D;
      if (slots[t] < 0) {
        std::memset(to, 0, static_cast<size_t>(cache.D) * sizeof(float));
        continue;
      }
      const char* row = cache.row(slots[t] / cache.R, h, slots[t] % cache.R);
      switch (cache.codec) {
        case kv::F32: read_floats(reinterpret_cast<const float*>(row), cache.D, to); break;
        case kv::F16: read_floats(reinterpret_cast<const f16*>(row), cache.D, to); break;
        case kv::Q8_0: read_q8_0(reinterpret_cast<const uint8_t*>(row), cache.D, to); break;
        case kv::TQ4: read_tq4(reinterpret_cast<const uint8_t*>(row), cache.D, cache.width, to); break;
      }
    }
}
