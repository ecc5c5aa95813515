// How attention is cut into pieces of work: shared by paged_attention and attention. Bits never depend on the cut.
#pragma once
#include <atomic>
#include <vector>

#include "binding.h"

namespace dasllama {

// Writes a.out for all T rows; every page that a row sees has been checked.
inline void run_attention(const AttentionArgs& a, int64_t T) {
  // Vectors of a tile: enough to pay for converting a block of halves, few enough for a second-level cache.
  const int64_t wanted = a.k.D < 128 ? 128 : 64;
  const int64_t group = a.H / a.k.G, most_rows = group < wanted ? wanted / group : 1;
  const Kernels& k = kernels();

  struct Span {
    AttentionTile tile;
    int64_t first, last;  // splits [first, last) that some row sees
    int64_t part;         // index of the span's first split among all splits of all spans
    int64_t floats;       // where the states of its splits begin, if they are kept: [splits, G, state]
  };
  std::vector<Span> spans;
  int64_t parts = 0, work = 0;
  for (int64_t t = 0; t < T; t++) {
    if (a.row_seq[t] < 0 || a.row_begin[t] >= a.row_end[t]) {
      for (int64_t i = t * a.H * a.v.D; i < (t + 1) * a.H * a.v.D; i++) a.out[i] = 0;
      continue;
    }
    const int64_t first = a.row_begin[t] / kAttentionSplit, last = (a.row_end[t] - 1) / kAttentionSplit + 1;
    work += (a.row_end[t] - a.row_begin[t]) * a.H * (a.k.D + a.v.D);
    Span* open = spans.empty() ? nullptr : &spans.back();
    if (open && open->tile.row + open->tile.rows == t && open->tile.rows < most_rows &&
        a.row_seq[t - 1] == a.row_seq[t]) {
      open->tile.rows++;
      open->first = first < open->first ? first : open->first;
      open->last = last > open->last ? last : open->last;
    } else {
      spans.push_back({{t, 1}, first, last, 0, 0});
    }
  }
  int64_t floats = 0;
  for (Span& span : spans) {
    span.part = parts;
    span.floats = floats;
    parts += span.last - span.first;
    floats += (span.last - span.first) * a.k.G * attention_state(a, span.tile.rows * group);
  }
  const int64_t tiles = static_cast<int64_t>(spans.size()), items = tiles * a.k.G;
  // A thread is worth waking for about 100,000 multiply-adds.
  const int64_t useful = work / 100000 + 1, available = available_threads();
  const int64_t threads = useful < available ? useful : available;

  // Pieces differ in length (a causal triangle), so threads draw them one by one, the longest first.
  const auto draw = [&](int64_t n, const auto& piece) {
    std::atomic<int64_t> next{0};
    parallel(threads, 1, [&](int64_t, int64_t) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) piece(n - 1 - i);
    });
  };
  // Kept by each thread: freshly mapped memory would cost a page fault per 4 kB on every call.
  const auto scratch = [](int64_t floats) {
    static thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
    return memory.data();
  };
  const auto fold = [&](const Span& span, int64_t g, float* total, const auto& part_of) {
    const int64_t vectors = span.tile.rows * group;
    for (int64_t i = 0; i < attention_state(a, vectors); i++) total[i] = i < vectors ? -INFINITY : 0;
    for (int64_t s = span.first; s < span.last; s++) k.attention_merge(a, span.tile, part_of(s), total);
    k.attention_finish(a, span.tile, g, total);
  };

  if (threads == 1 || items >= 4 * threads || parts == tiles) {  // a piece: a tile of one kv head
    draw(items, [&](int64_t i) {
      const Span& span = spans[i / a.k.G];
      const int64_t g = i % a.k.G, vectors = span.tile.rows * group, size = attention_state(a, vectors);
      float* total = scratch(2 * size + attention_scratch(a, vectors));
      k.attention_queries(a, span.tile, g, total + 2 * size);
      fold(span, g, total, [&](int64_t s) {
        k.attention_split(a, span.tile, g, s, total + size, total + 2 * size);
        return total + size;
      });
    });
    return;
  }
  // Few tiles over many keys: a piece is one split of them; the merge follows.
  static thread_local std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < floats) kept.resize(floats);
  float* states = kept.data();
  std::vector<int64_t> span_of(static_cast<size_t>(parts));
  for (int64_t i = 0; i < tiles; i++)
    for (int64_t s = spans[i].first; s < spans[i].last; s++) span_of[spans[i].part + s - spans[i].first] = i;
  const auto state = [&](const Span& span, int64_t s, int64_t g) {
    return states + span.floats + ((s - span.first) * a.k.G + g) * attention_state(a, span.tile.rows * group);
  };
  draw(parts * a.k.G, [&](int64_t i) {
    const Span& span = spans[span_of[i / a.k.G]];
    const int64_t s = span.first + i / a.k.G - span.part, g = i % a.k.G;
    float* memory = scratch(attention_scratch(a, span.tile.rows * group));
    k.attention_queries(a, span.tile, g, memory);
    k.attention_split(a, span.tile, g, s, state(span, s, g), memory);
  });
  draw(items, [&](int64_t i) {
    const Span& span = spans[i / a.k.G];
    fold(span, i % a.k.G, scratch(attention_state(a, span.tile.rows * group)),
         [&](int64_t s) { return state(span, s, i % a.k.G); });
  });
}

}  // namespace dasllama
