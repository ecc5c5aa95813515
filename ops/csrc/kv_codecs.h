// How a cache keeps the keys or values of a head: one row per codec. Python's twin is ops/kv_codecs.py, which holds the
// arithmetic too; kernels/kv_codecs.inl packs and unpacks. Knows no torch.
//
// A cache is [P, G, R, row]: pages, kv heads, rows of a page. Blocks hold `block` elements in `bytes` bytes, and a head
// is padded with zeros to whole blocks, if it is rotated to a power of two.
#pragma once
#include <cstdint>

#include "generated/ggml_types.h"

namespace dasllama {

struct KVCodec {
  const char* name;
  int block, bytes;
  bool rotated;
  int type;  // the weight type with the same integers and scales, for products with the codes; -1: plain floats
};

namespace kv {
constexpr int F32 = 0, F16 = 1, Q8_0 = 2, TQ4 = 3;
constexpr KVCodec codecs[] = {
    {"f32", 1, 4, false, -1},
    {"f16", 1, 2, false, -1},
    {"q8_0", 32, 34, false, types::Q8_0},
    {"tq4", 32, 18, true, types::Q4_0},
};
constexpr int count = sizeof codecs / sizeof *codecs;
constexpr int64_t most_rotated = 1024;  // elements of a head
}  // namespace kv

// One cache of keys or of values, as `kv_cache` makes it.
struct KVCache {
  void* data;
  int codec;
  int64_t page_bytes;  // from page to page; within one, rows lie without gaps
  int64_t G, R, D;     // D: elements of a head
  int64_t width;       // the same with what pads them, in the cache if the codec packs, else in scratch only
  int64_t row_bytes;

  bool packed() const { return kv::codecs[codec].type >= 0; }
  bool rotated() const { return kv::codecs[codec].rotated; }
  char* row(int64_t page, int64_t head, int64_t r) const {
    return static_cast<char*>(data) + page * page_bytes + (head * R + r) * row_bytes;
  }
};

inline KVCache kv_cache(void* data, int codec, int64_t page_bytes, int64_t G, int64_t R, int64_t D) {
  const KVCodec& c = kv::codecs[codec];
  const int64_t unit = c.type < 0 ? 16 : c.block;
  int64_t width = (D + unit - 1) / unit * unit;
  if (c.rotated)
    for (width = unit; width < D;) width *= 2;
  return {data, codec, page_bytes, G, R, D, width, (c.type < 0 ? D : width) / c.block * c.bytes};
}

}  // namespace dasllama
