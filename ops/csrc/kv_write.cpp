// Binding of kv_write; semantics in ops/kv_write.py, loop in kernels/kv_write.inl.
#include "views.h"

namespace dasllama {
namespace {

// Checks a cache [P, G, R, D] against the rows that go into it.
void check_cache(const char* rows_name, const HeadRows& rows, const char* name, const Tensor& cache,
                 const Tensor& keys) {
  const bool stored = cache.scalar_type() == ScalarType::Float || cache.scalar_type() == ScalarType::Half;
  DASLLAMA_CHECK(stored && has_whole_pages(cache), "kv_write", name,
                 " must be f32 or f16 [P, G, R, D] with contiguous pages, found ", toString(cache.scalar_type()), " of rank ",
                 cache.dim());
  DASLLAMA_CHECK(cache.size(1) == rows.H && cache.size(3) == rows.D, "kv_write", rows_name, " has ", rows.H,
                 " heads of ", rows.D, ", ", name, " has ", cache.size(1), " of ", cache.size(3));
  DASLLAMA_CHECK(cache.size(0) == keys.size(0) && cache.size(2) == keys.size(2), "kv_write", name, " has ",
                 cache.size(0), " pages of ", cache.size(2), " rows, k_cache has ", keys.size(0), " of ", keys.size(2));
}

void kv_write(const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache, const Tensor& slots) {
  DASLLAMA_CHECK(is_floating(k) && is_floating(v) && k.dim() >= 2 && v.dim() >= 2, "kv_write",
                 "k and v must be floating tensors [..., G, D], found ranks ", k.dim(), " and ", v.dim());
  DASLLAMA_CHECK(slots.scalar_type() == ScalarType::Long && slots.dim() == 1 && slots.is_contiguous(), "kv_write",
                 "slots must be contiguous int64 [T], found ", toString(slots.scalar_type()), " of rank ", slots.dim());
  const HeadRows keys(k), values(v);
  const int64_t T = slots.size(0);
  DASLLAMA_CHECK(keys.T == T && values.T == T, "kv_write", "k and v must have one row per slot, found ", keys.T,
                 " and ", values.T, " rows for ", T, " slots");
  check_cache("k", keys, "k_cache", k_cache, k_cache);
  check_cache("v", values, "v_cache", v_cache, k_cache);
  const int64_t R = k_cache.size(2), total = k_cache.size(0) * R;
  const int64_t* at = slots.const_data_ptr<int64_t>();
  void *k_data = k_cache.mutable_data_ptr(), *v_data = v_cache.mutable_data_ptr();
  const bool k_half = k_cache.scalar_type() == ScalarType::Half, v_half = v_cache.scalar_type() == ScalarType::Half;
  const int64_t k_page = k_cache.stride(0), v_page = v_cache.stride(0);
  perform({k_cache, v_cache, slots}, [=] {
    for (int64_t t = 0; t < T; t++)
      DASLLAMA_CHECK(at[t] >= -1 && at[t] < total, "kv_write", "slots[", t, "] is ", at[t],
                     ", wanted -1 (skip) or less than ", total, " (", total / R, " pages of ", R, " rows)");
    const Kernels& kernel = kernels();
    count_call("kv_write", kernel.name);
    parallel(T, 1 + 16384 / (keys.H * (keys.D + values.D) + 1), [&](int64_t begin, int64_t end) {
      kernel.kv_write(keys.data, keys.row_stride, keys.head_stride, keys.H, keys.D, at, k_data, k_half, k_page,
                      R, begin, end);
      kernel.kv_write(values.data, values.row_stride, values.head_stride, values.H, values.D, at, v_data, v_half,
                      v_page, R, begin, end);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("kv_write", TORCH_BOX(&kv_write)); }

}  // namespace dasllama
