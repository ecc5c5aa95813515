// Attention of ragged rows over a paged cache, with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
//
//   s[j] = scale * q . k[j], soft-capped to c tanh(s / c);  out = sum_j exp(s[j]) v[j] / (sum_j exp(s[j]) + exp(sink))
//
// A tile is some consecutive rows of one sequence times the H / G query heads of one kv head: its "vectors", row-major.
// Layouts: caches [P, G, R, row]; scores [vectors, 64]; a state is m, l (running maximum and sum) and acc [width of a
// value] of each vector, which is in the order and, under tq4, in the rotation of the values' codes until the end.
//
// The order of every sum is fixed by the keys' absolute positions alone, so a row's bits do not depend on its tile:
// keys go in blocks of 64 that start at multiples of 64, each with one rescale; blocks are gathered in splits of 256,
// which are merged in ascending order. A key that a row does not see takes no part in that row's arithmetic, whatever it
// holds. q . k is in attention_scores.inl, the sum of values in attention_values.inl.

struct State {
  float *m, *l, *acc;  // [vectors], [vectors], [vectors, padded Dv]
  State(float* p, int64_t vectors) : m(p), l(p + vectors), acc(p + 2 * vectors) {}
};

// Turns a vector's raw dot products into exp(s - m), zero outside of `keys`, and updates m and l. Returns the factor
// that the older part of the state shrinks by.
static float soften(const AttentionArgs& a, Range keys, float* scores, float* m, float* l) {
  static const float count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 s[kKeys / 16], top = splat16(-INFINITY);
  for (int b = 0; b < kKeys / 16; b++) {
    s[b] = load16(scores + 16 * b) * a.scale;
    if (a.softcap > 0) s[b] = vtanh(s[b] / splat16(a.softcap)) * a.softcap;
    if (keys.begin > 16 * b || keys.end < 16 * b + 16) {
      const f32x16 key = load16(count), none = splat16(-INFINITY);
      s[b] = select(less(key, splat16(static_cast<float>(keys.end - 16 * b))), s[b], none);
      s[b] = select(less(key, splat16(static_cast<float>(keys.begin - 16 * b))), none, s[b]);
    }
    top = max(top, s[b]);
  }
  const float before = *m, most = max16(top);
  *m = most > before ? most : before;
  f32x16 sums = {};
  for (int b = 0; b < kKeys / 16; b++) {
    s[b] = vexp(s[b] - splat16(*m));
    store16(scores + 16 * b, s[b]);
    sums += s[b];
  }
  const float shrink = *m == before ? 1.0f : exp_one(before - *m);
  *l = *l * shrink + sum16(sums);
  return shrink;
}

// ---- a tile ---------------------------------------------------------------------------------------------------------

// The vectors as `attention_split` finds them at the begin of its scratch: f32 rows, or integers for packed keys.
static void attention_queries(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, float* scratch) {
  const int64_t group = a.H / a.k.G, vectors = tile.rows * group, D = a.k.width;
  const bool packed = a.k.packed();
  const IntTraits traits = packed ? a.integer->traits(kv::codecs[a.k.codec].type) : IntTraits{};
  const IntActivation x = query_codes(scratch, vectors, D);
  float* head = scratch + vectors * D;  // where keys come later
  for (int64_t i = 0; i < vectors; i++) {
    float* to = packed ? head : scratch + i * D;
    widen_row(a.q + (tile.row + i / group) * a.q_row + (kv_head * group + i % group) * a.q_head, a.k.D, to);
    if (packed) round_query(a.k, traits, to, x, i);
  }
}

// The state of one split of 256 keys, from nothing.
static void attention_split(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, int64_t split, float* state,
                            float* scratch) {
  const int64_t group = a.H / a.k.G, vectors = tile.rows * group, D = a.k.width, Dv = a.v.width;
  float *q = scratch, *keys = q + vectors * D, *values = keys + kKeys * (D + kAttentionPad);
  float* scores = values + kKeys * (Dv + kAttentionPad);
  Range* ranges = reinterpret_cast<Range*>(scores + vectors * kKeys);
  float* value_d = reinterpret_cast<float*>(ranges + vectors);  // of packed values
  float* scaled = value_d + kKeys * (Dv / 32);
  const State s(state, vectors);
  for (int64_t i = 0; i < vectors; i++) {
    s.m[i] = -INFINITY;
    s.l[i] = 0;
  }
  std::memset(s.acc, 0, static_cast<size_t>(vectors * Dv) * sizeof(float));

  const int32_t* pages = a.block_table + static_cast<int64_t>(a.row_seq[tile.row]) * a.B;
  const Rows all_keys = {a.k, pages, kv_head}, all_values = {a.v, pages, kv_head};
  const int64_t end = a.row_end[tile.row + tile.rows - 1];
  for (int64_t start = split * kAttentionSplit; start < (split + 1) * kAttentionSplit; start += kKeys) {
    uint64_t seen = 0;
    for (int64_t i = 0; i < vectors; i++) {
      const int64_t row = tile.row + i / group, first = a.row_begin[row] - start, last = a.row_end[row] - start;
      const Range r = {static_cast<int>(first < 0       ? 0
                                        : first > kKeys ? kKeys
                                                        : first),
                       static_cast<int>(last < 0       ? 0
                                        : last > kKeys ? kKeys
                                                       : last)};
      ranges[i] = r;
      if (!r.empty()) seen |= (~uint64_t{0} >> (kKeys - (r.end - r.begin))) << r.begin;
    }
    if (!seen) continue;

    const Block k = a.k.packed() ? all_keys.fetch_packed(start, seen, keys) : all_keys.fetch(start, seen, vectors, keys);
    const Ahead then = all_values.ahead(start, end, vectors);
    if (a.k.packed()) {
      then.with_keys(0, kKeys);
      score_codes(a, query_codes(q, vectors, D), k, ranges, vectors, scores);
    } else if (k.in_place && a.k.codec == kv::F16) {
      score_floats(q, static_cast<const f16*>(k.data), k.stride / 2, D, ranges, vectors, scores, then);
    } else {
      score_floats(q, static_cast<const float*>(k.data), k.stride / 4, D, ranges, vectors, scores, then);
    }

    for (int64_t i = 0; i < vectors; i++) {
      if (ranges[i].empty()) continue;
      const float shrink = soften(a, ranges[i], scores + i * kKeys, s.m + i, s.l + i);
      if (shrink != 1.0f)
        for (int64_t d = 0; d < Dv; d += 16) store16(s.acc + i * Dv + d, load16(s.acc + i * Dv + d) * shrink);
    }

    const Block v = all_values.fetch(start, seen, vectors, values);
    const Ahead later = all_keys.ahead(start + kKeys, end, vectors);
    if (a.v.packed()) {
      value_scales(all_values, start, seen, value_d);
      weigh_codes(scores, v, a.v, value_d, ranges, vectors, s.acc, scaled, later);
    } else if (v.in_place && a.v.codec == kv::F16) {
      weigh_floats(scores, static_cast<const f16*>(v.data), v.stride, Dv, ranges, vectors, s.acc, later);
    } else {
      weigh_floats(scores, static_cast<const float*>(v.data), v.stride, Dv, ranges, vectors, s.acc, later);
    }
  }
}

// total <- total and the split that follows it.
static void attention_merge(const AttentionArgs& a, AttentionTile tile, const float* split, float* total) {
  const int64_t vectors = tile.rows * (a.H / a.k.G), Dv = a.v.width;
  const State t(total, vectors), s(const_cast<float*>(split), vectors);
  for (int64_t i = 0; i < vectors; i++) {
    if (s.l[i] == 0) continue;  // a split of which the row sees nothing
    const float m = s.m[i] > t.m[i] ? s.m[i] : t.m[i];
    const float old = exp_one(t.m[i] - m), add = exp_one(s.m[i] - m);
    t.m[i] = m;
    t.l[i] = t.l[i] * old + s.l[i] * add;
    for (int64_t d = i * Dv; d < (i + 1) * Dv; d += 16)
      store16(t.acc + d, load16(t.acc + d) * old + load16(s.acc + d) * add);
  }
}

// Divides by the sums and writes the tile's part of out [T, H, Dv].
static void attention_finish(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, const float* total) {
  const int64_t group = a.H / a.k.G, vectors = tile.rows * group, Dv = a.v.width;
  const State t(const_cast<float*>(total), vectors);
  for (int64_t i = 0; i < vectors; i++) {
    const int64_t head = kv_head * group + i % group;
    float* out = a.out + ((tile.row + i / group) * a.H + head) * a.v.D;
    float l = t.l[i], shrink = 1.0f;
    if (l != 0 && a.sinks) {
      const float sink = a.sinks[head], m = sink > t.m[i] ? sink : t.m[i];
      shrink = exp_one(t.m[i] - m);
      l = l * shrink + exp_one(sink - m);
    }
    const float factor = l == 0 ? 0.0f : shrink / l;  // a row that sees nothing yields zeros
    const float* acc = t.acc + i * Dv;
    if (a.v.rotated()) {
      alignas(64) float value[kv::most_rotated];
      for (int64_t b = 0; b < Dv; b += 32)
        for (int64_t d = 0; d < 16; d++) {
          value[b + 2 * d] = acc[b + d] * factor;
          value[b + 2 * d + 1] = acc[b + 16 + d] * factor;
        }
      rotate_back(value, Dv);
      std::memcpy(out, value, static_cast<size_t>(a.v.D) * sizeof(float));
      continue;
    }
    by_sixteen(0, a.v.D, [&](int64_t d, auto m) { put16(out + d, load16(acc + d) * factor, m); });
  }
}
