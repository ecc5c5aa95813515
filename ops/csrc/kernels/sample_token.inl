// One draw of a token; formula in ops/sample_token.py. One thread reads the logits a few times, from the second-level
// cache, and nothing sorts the vocabulary: where top-k and top-p cut is found by weighing what lies above two pivots and
// going on with what lies between them. Masses are sums in 16 lanes over a block, in double over the blocks.

constexpr float kLowest = -0x1.fffffep127f;  // of all numbers: what fills up 16 lanes is below it
constexpr int64_t kPivotSample = 256;        // elements that pivots are chosen among; no more than these are ever sorted
constexpr int64_t kPivotRanks = 16;          // how far from the rank where the cut is expected: twice the usual error

// The first m <= 16 elements, and after them what is below all numbers.
static DASLLAMA_INLINE f32x16 take16_or_lowest(const float* p, int64_t m) {
  if (m == 16) return load16(p);
  float padded[16];
  std::fill(padded, padded + 16, -INFINITY);
  std::memcpy(padded, p, static_cast<size_t>(m) * sizeof(float));
  return load16(padded);
}

// f(i) for each i in [0, n), in order, whose lane test(v) sets.
template <class Test, class F>
static DASLLAMA_INLINE void for_each(const float* v, int64_t n, const Test& test, const F& f) {
  by_sixteen(0, n, [&](int64_t i, auto m) {
    for (uint32_t bits = bits_of(test(take16(v + i, m))) & ((1u << m) - 1); bits; bits &= bits - 1)
      f(i + __builtin_ctz(bits));
  });
}

static DASLLAMA_INLINE i32x16 equal(f32x16 a, f32x16 b) { return at_most(a, b) & at_most(b, a); }

struct Largest {
  float value;
  int64_t index;  // the lowest of those that have it
};

// value is infinity where an element is NaN or +infinity. Penalized logits come to lie in a.e, with all others.
static Largest find_largest(const SampleArgs& a) {
  const f32x16 inf = splat16(INFINITY);
  const float* x = a.penalized ? a.e : a.logits;
  Largest found = {-INFINITY, 0};
  for (int64_t begin = 0, next = 0; begin < a.V; begin += kSampleBlock) {
    const int64_t end = std::min(begin + kSampleBlock, a.V);
    if (a.penalized) {
      std::copy(a.logits + begin, a.logits + end, a.e + begin);
      for (; next < a.penalized && a.penalized_ids[next] < end; next++)
        a.e[a.penalized_ids[next]] = a.penalized_logits[next];
    }
    f32x16 even = splat16(-INFINITY), odd = even;
    i32x16 numbers = less(even, inf);
    const auto take = [&](f32x16& top, f32x16 v) __attribute__((always_inline)) {
      top = max(top, v);
      numbers = numbers & less(v, inf);
    };
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
      take(even, load16(x + i));
      take(odd, load16(x + i + 16));
    }
    by_sixteen(i, end, [&](int64_t i, auto m) { take(even, take16_or_lowest(x + i, m)); });
    const float top = bits_of(numbers) == 0xffff ? max16(max(even, odd)) : INFINITY;
    if (top > found.value) found = {top, begin};
  }
  while (x[found.index] < found.value) found.index++;
  return found;
}

// Sums of the blocks of n elements f(i, m), to blocks; their sum. Backwards: what was read last is still in the cache.
template <class F>
static DASLLAMA_INLINE double sum_blocks(int64_t n, double* blocks, const F& f) {
  const int64_t count = sample_blocks(n);
  for (int64_t b = count; b-- > 0;) {
    f32x16 sum = {};
    by_sixteen(b * kSampleBlock, std::min((b + 1) * kSampleBlock, n), [&](int64_t i, auto m) { sum += f(i, m); });
    blocks[b] = sum16(sum);
  }
  double total = 0;
  for (int64_t b = 0; b < count; b++) total += blocks[b];
  return total;
}

// e = exp((x - top) * scale), of numbers x <= top.
static double exponentials(const float* x, int64_t n, float top, float scale, float* e, double* blocks) {
  return sum_blocks(n, blocks, [&](int64_t i, auto m) {
    const f32x16 y = vexp_moderate((take16_or_lowest(x + i, m) - splat16(top)) * splat16(scale));
    put16(e + i, y, m);
    return y;
  });
}

// Of those of e that are at least `least`.
static double masses(const float* e, int64_t n, float least, double* blocks) {
  return sum_blocks(n, blocks, [&](int64_t i, auto m) {
    const f32x16 v = take16(e + i, m);
    return select(less(v, splat16(least)), f32x16{}, v);
  });
}

// What an element adds to what is cut: its mass, or one.
template <bool kMass>
static DASLLAMA_INLINE float weight_of(float v) {
  return kMass ? v : 1.0f;
}

struct Band {
  float least, above;  // what lies between the two, without either
  int64_t n;
  double from_least, from_above;  // weight of the elements that are at least that
};

// The elements between least and above go to list, where 16 more may be written.
template <bool kMass>
static Band gather(const float* v, int64_t n, float least, float above, float* list) {
  const f32x16 low = splat16(least), high = splat16(above);
  Band band = {least, above, 0, 0, 0};
  for (int64_t begin = 0; begin < n; begin += kSampleBlock) {
    f32x16 from_least = {}, from_above = {};
    by_sixteen(begin, std::min(begin + kSampleBlock, n), [&](int64_t i, auto m) {
      const f32x16 x = take16_or_lowest(v + i, m), weight = kMass ? x : splat16(1.0f);
      from_least += select(less(x, low), f32x16{}, weight);
      from_above += select(less(x, high), f32x16{}, weight);
      band.n += compress(list + band.n, x, less(low, x) & less(x, high));
    });
    band.from_least += sum16(from_least);
    band.from_above += sum16(from_above);
  }
  return band;
}

// Largest first: each counts how many come before it.
static void sort_sample(const float* v, int64_t n, float* sorted) {
  for (int64_t i = 0; i < n; i++) {
    int32_t rank = 0;
    for (int64_t j = 0; j < i; j++) rank += v[j] >= v[i];
    for (int64_t j = i + 1; j < n; j++) rank += v[j] > v[i];
    sorted[rank] = v[i];
  }
}

// The elements above `value` stay, and the first `equals` of those, `all_equals`, that have it.
struct Cut {
  float value;
  int64_t equals, all_equals;
};

// The fewest of the largest elements whose weight reaches target, of v, whose weight is total. list and spare: memory for
// v and 16 elements more; blocks: for sums of v's blocks.
template <bool kMass>
static Cut find_cut(const float* v, int64_t n, double total, double target, float* list, float* spare,
                    double* blocks) {
  for (;;) {
    float sample[kPivotSample], sorted[kPivotSample];
    const int64_t s = std::min(n, kPivotSample);
    for (int64_t i = 0; i < s; i++) sample[i] = v[i * n / s];
    sort_sample(sample, s, sorted);
    if (s == n) {
      double reached = 0;
      int64_t last = 0, first, end;
      while ((reached += weight_of<kMass>(sorted[last])) < target && last + 1 < n) last++;
      for (first = last; first > 0 && sorted[first - 1] == sorted[last];) first--;
      for (end = last + 1; end < n && sorted[end] == sorted[last];) end++;
      return {sorted[last], last + 1 - first, end - first};
    }
    // Counted from below, where a sample says most: a few of the largest may have nearly all of the mass.
    const double below = (total - target) * static_cast<double>(s) / static_cast<double>(n);
    double passed = 0;
    int64_t rank = s - 1;
    while (rank > 0 && (passed += weight_of<kMass>(sorted[rank])) < below) rank--;
    Band band = gather<kMass>(v, n, rank + kPivotRanks < s ? sorted[rank + kPivotRanks] : kLowest,
                              rank < kPivotRanks ? INFINITY : sorted[rank - kPivotRanks], list);
    if (band.from_above >= target)
      band = gather<kMass>(v, n, band.above, INFINITY, list);
    else if (band.from_least < target)
      band = gather<kMass>(v, n, kLowest, band.least, list);
    target -= band.from_above;
    total = kMass ? masses(list, band.n, 0, blocks) : static_cast<double>(band.n);
    if (total < target) {  // the cut is the lower one
      int64_t equals = 0;
      for_each(v, n, [&](f32x16 x) { return equal(x, splat16(band.least)); }, [&](int64_t) { equals++; });
      const double wanted = std::ceil((target - total) / weight_of<kMass>(band.least));
      return {band.least, static_cast<int64_t>(std::min(std::max(wanted, 1.0), static_cast<double>(equals))), equals};
    }
    v = list;
    n = band.n;
    std::swap(list, spare);
  }
}

// The element that `draw` falls on when those from `least` on share [0, 1) by their masses e, in their order. blocks and
// total: their masses.
static int64_t draw_element(const float* e, int64_t n, float least, const double* blocks, double total, double draw) {
  const double goal = draw * total;
  double begin = 0, end = 0;  // of the block
  int64_t chosen = 0;
  for (int64_t b = 0; b * kSampleBlock < n && end <= goal; b++)
    if (blocks[b] > 0) {
      chosen = b * kSampleBlock;
      begin = end;
      end += blocks[b];
    }
  const int64_t stop = std::min(chosen + kSampleBlock, n);
  for (int64_t i = chosen; i < stop && begin <= goal; i++)
    if (e[i] >= least && e[i] > 0) {
      chosen = i;
      begin += e[i];
    }
  return chosen;
}

// Penalized logits lie where the exponentials go: what is read of them has been, where e is written.
static int64_t sample_token(const SampleArgs& a) {
  const Largest top = find_largest(a);
  if (!(std::fabs(top.value) < INFINITY)) return -1;
  if (a.temp <= 0) return top.index;
  double* blocks = a.blocks;
  float *e = a.e, *list = a.list;
  const float* x = a.penalized ? e : a.logits;
  int64_t n = a.V;
  const int32_t* ids = nullptr;
  if (a.top_k > 0 && a.top_k < n) {
    const Cut cut = find_cut<false>(x, n, static_cast<double>(n), static_cast<double>(a.top_k), list, a.spare, blocks);
    int64_t kept = 0, equals = cut.equals;
    for_each(
        x, n, [&](f32x16 v) { return at_most(splat16(cut.value), v); },
        [&](int64_t i) {
          if (x[i] == cut.value && equals-- <= 0) return;
          list[kept] = x[i];
          a.ids[kept++] = static_cast<int32_t>(i);
        });
    x = list;
    n = kept;
    ids = a.ids;
  }
  // Neither 0 nor infinity, whose products with infinity and 0 are no numbers.
  const float scale = static_cast<float>(std::clamp(1 / a.temp, 0x1p-126, 0x1.fffffep127));
  double total = exponentials(x, n, top.value, scale, e, blocks);
  float least = static_cast<float>(a.min_p);
  if (a.top_p < 1) {
    const Cut cut = find_cut<true>(e, n, total, a.top_p * total, list, a.spare, blocks + sample_blocks(n));
    int64_t equals = cut.equals;
    if (equals < cut.all_equals)
      for_each(
          e, n, [&](f32x16 v) { return equal(v, splat16(cut.value)); },
          [&](int64_t i) {
            if (equals-- <= 0) e[i] = 0;
          });
    least = std::max(least, cut.value);
  }
  if (least > 0) total = masses(e, n, least, blocks);
  const int64_t drawn = draw_element(e, n, least, blocks, total, a.draw);
  return ids ? ids[drawn] : drawn;
}
