// Bindings of kv_write and kv_read; semantics in ops/kv_write.py and ops/kv_read.py, loops in kernels/kv_codecs.inl.
#include "kv_cache.h"
#include "views.h"

namespace dasllama {
namespace {

// Checks a cache against the rows that go into it.
KVCache cache_for(const char* rows_name, const HeadRows& rows, const char* name, const Tensor& cache, int64_t codec,
                  const Tensor& keys) {
  const KVCache made = checked_cache("kv_write", name, cache, codec, rows.D);
  DASLLAMA_CHECK(made.G == rows.H, "kv_write", rows_name, " has ", rows.H, " heads, ", name, " has ", made.G);
  DASLLAMA_CHECK(cache.size(0) == keys.size(0) && cache.size(2) == keys.size(2), "kv_write", name, " has ",
                 cache.size(0), " pages of ", cache.size(2), " rows, k_cache has ", keys.size(0), " of ", keys.size(2));
  return made;
}

void kv_write(const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache, const Tensor& slots, int64_t k_codec,
              int64_t v_codec) {
  DASLLAMA_CHECK(is_floating(k) && is_floating(v) && k.dim() >= 2 && v.dim() >= 2, "kv_write",
                 "k and v must be floating tensors [..., G, D], found ranks ", k.dim(), " and ", v.dim());
  const int64_t* at = checked_slots("kv_write", slots);
  const HeadRows keys(k), values(v);
  const int64_t T = slots.size(0);
  DASLLAMA_CHECK(keys.T == T && values.T == T, "kv_write", "k and v must have one row per slot, found ", keys.T,
                 " and ", values.T, " rows for ", T, " slots");
  const KVCache to_k = cache_for("k", keys, "k_cache", k_cache, k_codec, k_cache),
                to_v = cache_for("v", values, "v_cache", v_cache, v_codec, k_cache);
  const int64_t P = k_cache.size(0);
  perform({k_cache, v_cache, slots}, [=] {
    check_slots("kv_write", at, T, P, to_k.R);
    const Kernels& kernel = kernels();
    count_call("kv_write", kernel.name);
    parallel(T, 1 + 16384 / (keys.H * (keys.D + values.D) + 1), [&](int64_t begin, int64_t end) {
      kernel.kv_write(keys.data, keys.row_stride, keys.head_stride, at, to_k, begin, end);
      kernel.kv_write(values.data, values.row_stride, values.head_stride, at, to_v, begin, end);
    });
  });
}

Tensor kv_read(const Tensor& cache, const Tensor& slots, int64_t codec, int64_t dim) {
  DASLLAMA_CHECK(dim >= 1, "kv_read", "dim is ", dim, ", wanted 1 or more");
  const int64_t* at = checked_slots("kv_read", slots);
  const KVCache from = checked_cache("kv_read", "cache", cache, codec, dim);
  const int64_t T = slots.size(0), P = cache.size(0);
  Tensor out = new_like(slots, 1, {from.G, dim}, ScalarType::Float);
  float* to = out.mutable_data_ptr<float>();
  perform({cache, slots, out}, [=] {
    check_slots("kv_read", at, T, P, from.R);
    const Kernels& kernel = kernels();
    count_call("kv_read", kernel.name);
    parallel(T, 1 + 16384 / (from.G * dim + 1),
             [&](int64_t begin, int64_t end) { kernel.kv_read(from, at, to, begin, end); });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("kv_write", TORCH_BOX(&kv_write));
  m.impl("kv_read", TORCH_BOX(&kv_read));
}

}  // namespace dasllama
