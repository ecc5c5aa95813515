// Binding of paged_attention; semantics in ops/paged_attention.py, arithmetic in kernels/attention.inl.
#include "attention_tiles.h"
#include "kv_cache.h"
#include "views.h"

namespace dasllama {
namespace {

const int32_t* checked_rows(const char* name, const Tensor& t, int64_t T) {
  DASLLAMA_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.size(0) == T && t.is_contiguous(),
                 "paged_attention", name, " must be contiguous int32 [", T, "] as q has ", T, " rows, found ",
                 toString(t.scalar_type()), " with ", t.numel(), " elements");
  return t.const_data_ptr<int32_t>();
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                       const Tensor& row_seq, const Tensor& row_pos, const Tensor& row_end, double scale,
                       int64_t window, double softcap, const std::optional<Tensor>& sinks, int64_t k_codec,
                       int64_t v_codec, int64_t v_dim) {
  DASLLAMA_CHECK(is_floating(q) && q.dim() >= 2, "paged_attention", "q must be a floating tensor [..., H, D], found ",
                 toString(q.scalar_type()), " of rank ", q.dim());
  DASLLAMA_CHECK(v_dim >= 1, "paged_attention", "v_dim is ", v_dim, ", wanted 1 or more");
  const HeadRows queries(q);
  AttentionArgs a = {};
  a.k = checked_cache("paged_attention", "k_cache", k_cache, k_codec, queries.D);
  a.v = checked_cache("paged_attention", "v_cache", v_cache, v_codec, v_dim);
  const int64_t P = k_cache.size(0), G = a.k.G, R = a.k.R;
  DASLLAMA_CHECK(v_cache.size(0) == P && v_cache.size(1) == G && v_cache.size(2) == R, "paged_attention",
                 "k_cache is [", P, ", ", G, ", ", R, ", ...], v_cache is [", v_cache.size(0), ", ", v_cache.size(1),
                 ", ", v_cache.size(2), ", ...]");
  DASLLAMA_CHECK(G > 0 && queries.H % G == 0, "paged_attention", "q has ", queries.H,
                 " heads, wanted a multiple of the cache's ", G);
  DASLLAMA_CHECK(R > 0, "paged_attention", "pages must have rows, found k_cache with 0");
  DASLLAMA_CHECK(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 && block_table.is_contiguous(),
                 "paged_attention", "block_table must be contiguous int32 [S, B], found ",
                 toString(block_table.scalar_type()), " of rank ", block_table.dim());
  DASLLAMA_CHECK(window >= 0 && softcap >= 0, "paged_attention", "window and softcap must be 0 (none) or more, found ",
                 window, " and ", softcap);
  DASLLAMA_CHECK(!sinks || (sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 &&
                            sinks->size(0) == queries.H && sinks->is_contiguous()),
                 "paged_attention", "sinks must be contiguous f32 [", queries.H, "]");
  const int64_t T = queries.T, S = block_table.size(0), B = block_table.size(1);
  const int32_t* seq = checked_rows("row_seq", row_seq, T);
  const int32_t* pos = checked_rows("row_pos", row_pos, T);
  const int32_t* end = checked_rows("row_end", row_end, T);
  const int32_t* table = block_table.const_data_ptr<int32_t>();

  Tensor out = new_like(q, q.dim() - 1, {v_dim}, ScalarType::Float);
  a.q = queries.data, a.q_row = queries.row_stride, a.q_head = queries.head_stride;
  a.H = queries.H;
  a.block_table = table, a.B = B;
  a.row_seq = seq, a.row_end = end;
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap);
  a.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  a.out = out.mutable_data_ptr<float>();
  perform({queries.keep, k_cache, v_cache, block_table, row_seq, row_pos, row_end, sinks ? *sinks : q, out}, [=] {
    std::vector<int32_t> begin(static_cast<size_t>(T));
    int64_t checked_seq = -1, checked_first = 0, checked_last = 0;  // pages that the rows before have vouched for
    for (int64_t t = 0; t < T; t++) {
      if (seq[t] == -1) continue;
      DASLLAMA_CHECK(seq[t] >= 0 && seq[t] < S, "paged_attention", "row_seq[", t, "] is ", seq[t], ", wanted -1 to ",
                     S - 1);
      DASLLAMA_CHECK(end[t] >= 0 && end[t] <= B * R, "paged_attention", "row_end[", t, "] is ", end[t], ", wanted 0 to ",
                     B * R, " (", B, " pages of ", R, " rows)");
      const int64_t first_key = window && pos[t] >= window ? pos[t] - window + 1 : 0;
      begin[t] = static_cast<int32_t>(first_key < end[t] ? first_key : end[t]);
      if (begin[t] == end[t]) continue;
      const int64_t first = begin[t] / R, last = (end[t] - 1) / R + 1;
      if (seq[t] == checked_seq && first >= checked_first && last <= checked_last) continue;
      for (int64_t b = first; b < last; b++) {
        const int32_t page = table[seq[t] * B + b];
        DASLLAMA_CHECK(page >= 0 && page < P, "paged_attention", "row ", t, " sees keys ", begin[t], " to ", end[t] - 1,
                       " of sequence ", seq[t], ", but block_table[", seq[t], ", ", b, "] is ", page, ", wanted 0 to ",
                       P - 1);
      }
      checked_seq = seq[t], checked_first = first, checked_last = last;
    }
    AttentionArgs args = a;
    args.row_begin = begin.data();
    args.integer = kernels().integer;
    count_call("paged_attention", kernels().name);
    run_attention(args, T);
  });
  return as_dtype(out, q.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }

}  // namespace dasllama
