// One draw of a token; formula in ops/sample_token.py. One thread reads the logits a few times, from the second-level
// cache, and nothing of the vocabulary's length is written or sorted: exponentials are computed anew by each pass, block
// by block. Where top-k and top-p cut is found by weighing what lies above two pivots and going on with what lies between
// them. Masses are sums in 16 lanes over a block, in double over the blocks.

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

static DASLLAMA_INLINE i32x16 equal(f32x16 a, f32x16 b) { return at_most(a, b) & at_most(b, a); }

// Numbers that are read block by block: a list, logits after penalties, or exponentials of either.
class Values {
 public:
  Values(const float* list, int64_t n) : x_(list), n_(n) {}
  explicit Values(const SampleArgs& a)
      : x_(a.logits), n_(a.V), changed_(a.penalized_ids), changed_to_(a.penalized_logits), changes_(a.penalized) {}

  // Those of `x` from now on: exp((x - top) * scale), where no x is above top.
  static Values exponentials(const Values& x, float top, float scale) {
    Values e = x;
    e.top_ = top;
    e.scale_ = scale;
    return e;
  }

  int64_t size() const { return n_; }
  int64_t blocks() const { return sample_blocks(n_); }
  int64_t size_of(int64_t b) const { return std::min(kSampleBlock, n_ - b * kSampleBlock); }

  // The elements of a block, until the next call.
  const float* block(int64_t b) {
    const int64_t begin = b * kSampleBlock, n = size_of(b);
    const float* v = x_ + begin;
    const int64_t* end = changed_ + changes_;
    const int64_t* id = std::lower_bound(changed_, end, begin);
    if (id < end && *id < begin + n) {
      std::copy(v, v + n, buffer_);
      for (; id < end && *id < begin + n; id++) buffer_[*id - begin] = changed_to_[id - changed_];
      v = buffer_;
    }
    if (scale_ == 0) return v;
    by_sixteen(0, n, [&](int64_t i, auto m) { put16(buffer_ + i, exponential(take16_or_lowest(v + i, m)), m); });
    return buffer_;
  }

  int64_t sampled(int64_t i, int64_t count) const { return i * n_ / count; }

  // Every n/count-th element. Penalties are not seen, which is good enough to choose pivots; where all are taken, which
  // may be no more than a block, they are.
  void sample(int64_t count, float* to) {
    if (count == n_) {
      const float* v = block(0);
      std::copy(v, v + n_, to);
      return;
    }
    for (int64_t i = 0; i < count; i++) to[i] = x_[sampled(i, count)];
    if (scale_ == 0) return;
    by_sixteen(0, count, [&](int64_t i, auto m) {
      const f32x16 x = take16_or_lowest(to + i, m), top = splat16(top_);
      put16(to + i, exponential(select(less(top, x), top, x)), m);
    });
  }

  f32x16 exponential(f32x16 x) const { return vexp_moderate((x - splat16(top_)) * splat16(scale_)); }

 private:
  const float* x_;
  int64_t n_;
  const int64_t* changed_ = nullptr;
  const float* changed_to_ = nullptr;
  int64_t changes_ = 0;
  float top_ = 0, scale_ = 0;  // scale 0: no exponentials
  float buffer_[kSampleBlock];
};

struct Largest {
  float value;
  int64_t index;  // the lowest of those that have it
};

// value is infinity where an element is NaN or +infinity. tops: the largest of each block.
static Largest find_largest(Values& x, float* tops) {
  const f32x16 inf = splat16(INFINITY);
  float largest = -INFINITY;
  int64_t in = 0;
  for (int64_t b = 0; b < x.blocks(); b++) {
    const float* v = x.block(b);
    const int64_t n = x.size_of(b);
    f32x16 even = splat16(-INFINITY), odd = even;
    i32x16 numbers = less(even, inf);
    const auto take = [&](f32x16& top, f32x16 v) __attribute__((always_inline)) {
      top = max(top, v);
      numbers = numbers & less(v, inf);
    };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      take(even, load16(v + i));
      take(odd, load16(v + i + 16));
    }
    by_sixteen(i, n, [&](int64_t i, auto m) { take(even, take16_or_lowest(v + i, m)); });
    const float top = bits_of(numbers) == 0xffff ? max16(max(even, odd)) : INFINITY;
    tops[b] = top;
    if (top > largest) {
      largest = top;
      in = b;
    }
  }
  const float* v = x.block(in);
  int64_t i = 0;
  while (v[i] < largest) i++;
  return {largest, in * kSampleBlock + i};
}

// The elements that are at least `least`, and zeros for the others.
static DASLLAMA_INLINE f32x16 from(f32x16 least, f32x16 v) { return select(less(v, least), f32x16{}, v); }

// Masses of the blocks, to `blocks`, of the elements that are at least `least`; their sum. Backwards: what was read last
// is still in the cache.
static double masses(Values& e, float least, double* blocks) {
  for (int64_t b = e.blocks(); b-- > 0;) {
    const float* v = e.block(b);
    f32x16 sum = {};
    by_sixteen(0, e.size_of(b), [&](int64_t i, auto m) { sum += from(splat16(least), take16(v + i, m)); });
    blocks[b] = sum16(sum);
  }
  return std::accumulate(blocks, blocks + e.blocks(), 0.0);
}

// About what all masses come to: of each block the largest, whose logarithms are `tops`, which become masses, and of the
// others as much as a sample says.
static double expected_mass(Values& e, float* tops) {
  by_sixteen(0, e.blocks(), [&](int64_t b, auto m) { put16(tops + b, e.exponential(take16(tops + b, m)), m); });
  float sample[kPivotSample];
  e.sample(kPivotSample, sample);
  double others = 0;
  for (int64_t i = 0; i < kPivotSample; i++)
    if (sample[i] < tops[e.sampled(i, kPivotSample) / kSampleBlock]) others += sample[i];
  others *= static_cast<double>(e.size() - e.blocks()) / kPivotSample;
  return std::accumulate(tops, tops + e.blocks(), others);
}

// What an element adds to what is cut: its mass, or one.
template <bool kMass>
static DASLLAMA_INLINE float weight_of(float v) {
  return kMass ? v : 1.0f;
}

struct Band {
  float least, above;  // what lies between the two, without either
  int64_t n;
  double all, from_floor, from_above;  // weight of all elements, and of those that are at least that
};

// The elements between least and above go to list, where 16 more may be written. Unless null, parts is what each block
// has, and blocks the weight of its elements that are at least `floor`.
template <bool kMass>
static Band gather(Values& values, float least, float above, float floor, float* list, SamplePart* parts,
                   double* blocks) {
  const f32x16 low = splat16(least), high = splat16(above), bottom = splat16(floor);
  Band band = {least, above, 0, 0, 0, 0};
  for (int64_t b = 0; b < values.blocks(); b++) {
    const float* v = values.block(b);
    f32x16 all = {}, from_floor = {}, from_above = {};
    by_sixteen(0, values.size_of(b), [&](int64_t i, auto m) {
      const f32x16 x = take16_or_lowest(v + i, m), weight = kMass ? take16(v + i, m) : splat16(1.0f);
      all += weight;
      from_floor += select(less(x, bottom), f32x16{}, weight);
      from_above += select(less(x, high), f32x16{}, weight);
      band.n += compress(list + band.n, x, less(low, x) & less(x, high));
    });
    const float of_floor = sum16(from_floor), of_above = sum16(from_above);
    band.all += sum16(all);
    band.from_floor += of_floor;
    band.from_above += of_above;
    if (parts) {
      parts[b] = {of_above, band.n};
      blocks[b] = of_floor;
    }
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

static int64_t count_equal(const float* v, int64_t n, float value) {
  int64_t count = 0;
  by_sixteen(0, n, [&](int64_t i, auto m) {
    count += __builtin_popcount(bits_of(equal(take16_or_lowest(v + i, m), splat16(value))));
  });
  return count;
}

// The elements above `value` stay, and the first `equals` of those that have it. in_band: it lies in the list and parts
// that find_cut leaves. at_floor: it lies below the floor, and all that do not stay.
struct Cut {
  float value;
  int64_t equals;
  bool in_band = false, at_floor = false;
};

// The fewest of the largest elements whose weight reaches target_of(the weight of all), which is about `expected`, and
// exactly if there are no more than kPivotSample. At the floor, a.blocks holds the weights of what stays of the blocks.
template <bool kMass, class F>
static Cut find_cut(Values& values, double expected, const F& target_of, float floor, const SampleArgs& a) {
  Values narrowed(a.band, 0);
  Values* v = &values;
  float *list = a.band, *next = a.spare[0], *after_next = a.spare[1];
  double total = expected, target = target_of(total);
  for (bool in_band = false;; in_band = true) {
    float sample[kPivotSample], sorted[kPivotSample];
    const int64_t n = v->size(), s = std::min(n, kPivotSample);
    v->sample(s, sample);
    sort_sample(sample, s, sorted);
    if (s == n) {
      double reached = 0;
      int64_t last = 0, first;
      while ((reached += weight_of<kMass>(sorted[last])) < target && last + 1 < n) last++;
      for (first = last; first > 0 && sorted[first - 1] == sorted[last];) first--;
      return {sorted[last], last + 1 - first, in_band};
    }
    // Counted from below, where a sample says most: a few of the largest may have nearly all of the mass.
    const double below = (total - target) * static_cast<double>(s) / static_cast<double>(n);
    double passed = 0;
    int64_t rank = s - 1;
    while (rank > 0 && (passed += weight_of<kMass>(sorted[rank])) < below) rank--;
    const auto take = [&](float least, float above) {
      return gather<kMass>(*v, least, above, floor, list, in_band ? nullptr : a.parts, a.blocks);
    };
    Band band = take(rank + kPivotRanks < s ? sorted[rank + kPivotRanks] : kLowest,
                     rank < kPivotRanks ? INFINITY : sorted[rank - kPivotRanks]);
    if (!in_band) {
      target = target_of(band.all);
      if (floor > 0 && band.from_floor <= target) return {floor, 0, false, true};
    }
    if (band.from_above >= target) band = take(band.above, INFINITY);
    for (;;) {
      Values between(list, band.n);
      total = kMass ? masses(between, 0, a.blocks) : static_cast<double>(band.n);
      if (band.n && band.from_above + total >= target) break;
      // The cut is the lower one, or below it. Sums of another order may leave a little to be wanted below all.
      int64_t equals = 0;
      for (int64_t b = 0; b < v->blocks(); b++) equals += count_equal(v->block(b), v->size_of(b), band.least);
      const double wanted = std::ceil((target - band.from_above - total) / weight_of<kMass>(band.least));
      const auto most = static_cast<double>(equals);
      if (wanted <= most || band.least <= (kMass ? 0 : kLowest))
        return {band.least, static_cast<int64_t>(std::min(std::max(wanted, 1.0), most)), in_band};
      band = take(kLowest, band.least);
    }
    target -= band.from_above;
    narrowed = Values(list, band.n);
    v = &narrowed;
    list = next;
    std::swap(next, after_next);
  }
}

// What the cut leaves of each block: its mass, to a.blocks, and how many of the elements that have the cut's value, to
// a.equals; the sum of the masses.
static double cut_masses(Values& e, const Cut& cut, const SampleArgs& a) {
  const f32x16 value = splat16(cut.value);
  int64_t left = cut.equals, begin = 0;
  for (int64_t b = 0; b < e.blocks(); b++) {
    const float* v = cut.in_band ? a.band + begin : e.block(b);
    const int64_t n = cut.in_band ? a.parts[b].end - begin : e.size_of(b);
    f32x16 sum = {};
    by_sixteen(0, n, [&](int64_t i, auto m) {
      const f32x16 x = take16(v + i, m);
      sum += select(less(value, x), x, f32x16{});
    });
    const int64_t equals = std::min(left, count_equal(v, n, cut.value));
    left -= equals;
    begin += n;
    a.equals[b] = static_cast<int32_t>(equals);
    a.blocks[b] = (cut.in_band ? a.parts[b].from_above : 0) + sum16(sum) + static_cast<double>(equals) * cut.value;
  }
  return std::accumulate(a.blocks, a.blocks + e.blocks(), 0.0);
}

// The element that `draw` falls on when those above `least` share [0, 1) by their masses, in their order, and of those
// that are equal to it the first equals[b] of each block b; null: all. blocks and total: masses of what takes part.
static int64_t draw_element(Values& e, float least, const int32_t* equals, const double* blocks, double total,
                            double draw) {
  const double goal = draw * total;
  double begin = 0, end = 0;  // of the block
  int64_t in = 0;
  for (int64_t b = 0; b < e.blocks() && end <= goal; b++)
    if (blocks[b] > 0) {
      in = b;
      begin = end;
      end += blocks[b];
    }
  const float* v = e.block(in);
  const int64_t n = e.size_of(in);
  int64_t left = equals ? equals[in] : n, chosen = 0;
  for (int64_t i = 0; i < n && begin <= goal; i++)
    if (v[i] > 0 && (v[i] > least || (v[i] == least && left-- > 0))) {
      chosen = i;
      begin += v[i];
    }
  return in * kSampleBlock + chosen;
}

// The largest top_k elements, to a.kept, and their ids, to a.ids.
static Values keep_largest(Values& x, const SampleArgs& a) {
  const auto k = static_cast<double>(a.top_k);
  const Cut cut = find_cut<false>(x, static_cast<double>(x.size()), [k](double) { return k; }, 0, a);
  int64_t kept = 0, equals = cut.equals;
  for (int64_t b = 0; b < x.blocks(); b++) {
    const float* v = x.block(b);
    by_sixteen(0, x.size_of(b), [&](int64_t i, auto m) {
      const i32x16 stays = at_most(splat16(cut.value), take16_or_lowest(v + i, m));
      for (uint32_t bits = bits_of(stays) & ((1u << m) - 1); bits; bits &= bits - 1) {
        const int64_t at = i + __builtin_ctz(bits);
        if (v[at] == cut.value && equals-- <= 0) continue;
        a.kept[kept] = v[at];
        a.ids[kept++] = static_cast<int32_t>(b * kSampleBlock + at);
      }
    });
  }
  return {a.kept, kept};
}

static int64_t sample_token(const SampleArgs& a) {
  Values x(a);
  float* tops = a.spare[0];
  const Largest top = find_largest(x, tops);
  if (!(std::fabs(top.value) < INFINITY)) return -1;
  if (a.temp <= 0) return top.index;
  const bool cuts = a.top_k > 0 && a.top_k < a.V;
  if (cuts) x = keep_largest(x, a);
  // Neither 0 nor infinity, whose products with infinity and 0 are no numbers.
  const float scale = static_cast<float>(std::clamp(1 / a.temp, 0x1p-126, 0x1.fffffep127));
  Values e = Values::exponentials(x, top.value, scale);
  float least = static_cast<float>(a.min_p);
  const int32_t* equals = nullptr;
  double total;
  if (a.top_p == 1) {
    total = masses(e, least, a.blocks);
  } else {
    // To know the masses' sum beforehand would take a pass of exponentials more.
    const double expected = cuts || a.V <= kPivotSample ? masses(e, 0, a.blocks) : expected_mass(e, tops);
    const Cut cut = find_cut<true>(e, expected, [&](double all) { return a.top_p * all; }, least, a);
    if (cut.at_floor) {
      total = std::accumulate(a.blocks, a.blocks + e.blocks(), 0.0);
    } else if (cut.value < least) {
      total = masses(e, least, a.blocks);
    } else {
      total = cut_masses(e, cut, a);
      least = cut.value;
      equals = a.equals;
    }
  }
  const int64_t drawn = draw_element(e, least, equals, a.blocks, total, a.draw);
  return cuts ? a.ids[drawn] : drawn;
}
