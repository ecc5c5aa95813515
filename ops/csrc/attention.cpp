// Binding of attention and attention_backward: the functional form. Keys are laid out as a paged cache of the call's
// own, each at its position, and the paged kernels do the rest; so both forms give the same bits.
#include <algorithm>

#include "attention_tiles.h"
#include "views.h"

namespace dasllama {
namespace {

const int32_t* checked_ints(const char* name, const Tensor& t, int64_t n) {
  DASLLAMA_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.size(0) == n && t.is_contiguous(), "attention",
                 name, " must be contiguous int32 [", n, "], found ", toString(t.scalar_type()), " with ", t.numel(),
                 " elements");
  return t.const_data_ptr<int32_t>();
}

// A call's inputs, checked, and its keys in pages of one block.
struct Call {
  static constexpr int64_t R = kAttentionBlock;

  HeadRows q, k, v;
  int64_t T, S;
  std::vector<int64_t> slots;                 // [S] where each key lies, -1 for a key of no sequence
  std::vector<int32_t> table;                 // [sequences, B]
  std::vector<int32_t> row_seq, begin, end;   // [T] in the cache's terms
  std::vector<int64_t> page_seq, page_block;  // whose page it is and which of its table
  int64_t B = 0;
  Tensor k_cache, v_cache;
  AttentionArgs args = {};

  Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& q_seq, const Tensor& q_pos,
       const Tensor& q_end, const Tensor& k_seq, const Tensor& k_pos, double scale, int64_t window, double softcap,
       const std::optional<Tensor>& sinks)
      : q(checked_heads("q", q_)), k(checked_heads("k", k_)), v(checked_heads("v", v_)), T(q.T), S(k.T) {
    DASLLAMA_CHECK(v.T == S && v.H == k.H, "attention", "k has ", S, " rows of ", k.H, " heads, v has ", v.T, " of ",
                   v.H);
    DASLLAMA_CHECK(q.D == k.D, "attention", "q has heads of ", q.D, ", k of ", k.D);
    DASLLAMA_CHECK(k.H > 0 && q.H % k.H == 0, "attention", "q has ", q.H, " heads, wanted a multiple of k's ", k.H);
    DASLLAMA_CHECK(window >= 0 && softcap >= 0, "attention", "window and softcap must be 0 (none) or more, found ",
                   window, " and ", softcap);
    DASLLAMA_CHECK(!sinks || (sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 && sinks->size(0) == q.H &&
                              sinks->is_contiguous()),
                   "attention", "sinks must be contiguous f32 [", q.H, "]");
    place(checked_ints("q_seq", q_seq, T), checked_ints("q_pos", q_pos, T), checked_ints("q_end", q_end, T),
          checked_ints("k_seq", k_seq, S), checked_ints("k_pos", k_pos, S), window);

    const int64_t pages = static_cast<int64_t>(page_seq.size());
    k_cache = new_like(q.keep, 0, {pages, k.H, R, k.D}, ScalarType::Float);
    v_cache = new_like(q.keep, 0, {pages, k.H, R, v.D}, ScalarType::Float);
    args.k = kv_cache(k_cache.mutable_data_ptr(), kv::F32, 4 * k.H * R * k.D, k.H, R, k.D);
    args.v = kv_cache(v_cache.mutable_data_ptr(), kv::F32, 4 * v.H * R * v.D, v.H, R, v.D);
    parallel(S, 1 + 16384 / (k.H * (k.D + v.D) + 1), [&](int64_t first, int64_t last) {
      const Kernels& kernel = kernels();
      kernel.kv_write(k.data, k.row_stride, k.head_stride, slots.data(), args.k, first, last);
      kernel.kv_write(v.data, v.row_stride, v.head_stride, slots.data(), args.v, first, last);
    });
    args.q = q.data, args.q_row = q.row_stride, args.q_head = q.head_stride;
    args.H = q.H;
    args.block_table = table.data(), args.B = B;
    args.row_seq = row_seq.data(), args.row_begin = begin.data(), args.row_end = end.data();
    args.scale = static_cast<float>(scale), args.softcap = static_cast<float>(softcap);
    args.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  }

 private:
  static const Tensor& checked_heads(const char* name, const Tensor& x) {
    DASLLAMA_CHECK(is_floating(x) && x.dim() >= 2, "attention", name,
                   " must be a floating tensor [..., heads, dim], found ", toString(x.scalar_type()), " of rank ",
                   x.dim());
    return x;
  }

  // Gives every key a slot, so that keys of consecutive positions lie at those positions (less a multiple of a split).
  // Keys with gaps or repeats in their positions are packed in the order of their positions instead.
  void place(const int32_t* q_seq, const int32_t* q_pos, const int32_t* q_end, const int32_t* k_seq,
             const int32_t* k_pos, int64_t window) {
    std::vector<int64_t> order;
    for (int64_t s = 0; s < S; s++)
      if (k_seq[s] >= 0) order.push_back(s);
    const auto earlier = [&](int64_t a, int64_t b) {
      return k_seq[a] != k_seq[b] ? k_seq[a] < k_seq[b] : k_pos[a] < k_pos[b];
    };
    if (!std::is_sorted(order.begin(), order.end(), earlier)) std::stable_sort(order.begin(), order.end(), earlier);

    struct Sequence {
      int32_t id;
      int64_t first, last;  // its keys in `order`
      int64_t offset;       // index in the cache of its first key
    };
    std::vector<Sequence> sequences;
    for (int64_t i = 0; i < static_cast<int64_t>(order.size());) {
      int64_t j = i + 1;
      bool consecutive = k_pos[order[i]] >= 0;
      for (; j < static_cast<int64_t>(order.size()) && k_seq[order[j]] == k_seq[order[i]]; j++)
        consecutive &= k_pos[order[j]] == k_pos[order[j - 1]] + 1;
      const int64_t offset = consecutive ? k_pos[order[i]] % kAttentionSplit : 0;
      sequences.push_back({k_seq[order[i]], i, j, offset});
      B = std::max(B, (offset + j - i + R - 1) / R);
      i = j;
    }
    table.assign(sequences.size() * B, -1);
    slots.assign(S, -1);
    for (size_t n = 0; n < sequences.size(); n++) {
      const Sequence& s = sequences[n];
      for (int64_t i = s.first; i < s.last; i++) {
        const int64_t at = s.offset + i - s.first;
        int32_t& page = table[n * B + at / R];
        if (page < 0) {
          page = static_cast<int32_t>(page_seq.size());
          page_seq.push_back(static_cast<int64_t>(n));
          page_block.push_back(at / R);
        }
        slots[order[i]] = page * R + at % R;
      }
    }

    row_seq.assign(T, -1), begin.assign(T, 0), end.assign(T, 0);
    for (int64_t t = 0; t < T; t++) {
      const auto s = std::lower_bound(sequences.begin(), sequences.end(), q_seq[t],
                                      [](const Sequence& sequence, int32_t id) { return sequence.id < id; });
      if (s == sequences.end() || s->id != q_seq[t]) continue;
      row_seq[t] = static_cast<int32_t>(s - sequences.begin());
      const auto keys_before = [&](int64_t position) {
        const auto found = std::lower_bound(order.begin() + s->first, order.begin() + s->last, position,
                                            [&](int64_t key, int64_t p) { return k_pos[key] < p; });
        return static_cast<int32_t>(found - (order.begin() + s->first) + s->offset);
      };
      begin[t] = window ? keys_before(static_cast<int64_t>(q_pos[t]) - window + 1) : static_cast<int32_t>(s->offset);
      end[t] = std::max(begin[t], keys_before(q_end[t]));
    }
  }
};

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_seq, const Tensor& q_pos,
                 const Tensor& q_end, const Tensor& k_seq, const Tensor& k_pos, double scale, int64_t window,
                 double softcap, const std::optional<Tensor>& sinks) {
  Call call(q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, scale, window, softcap, sinks);
  Tensor out = new_like(q, q.dim() - 1, {v.size(-1)}, ScalarType::Float);
  call.args.out = out.mutable_data_ptr<float>();
  count_call("attention", kernels().name);
  run_attention(call.args, call.T);
  return as_dtype(out, q.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& q_seq, const Tensor& q_pos,
                                                      const Tensor& q_end, const Tensor& k_seq, const Tensor& k_pos,
                                                      double scale, int64_t window, double softcap,
                                                      const std::optional<Tensor>& sinks) {
  Call call(q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, scale, window, softcap, sinks);
  const AttentionArgs& a = call.args;
  DASLLAMA_CHECK(is_floating(grad) && grad.numel() == call.T * a.H * a.v.D, "attention_backward",
                 "grad must have the output's ", call.T * a.H * a.v.D, " elements, found ", grad.numel());
  const Tensor g = as_f32(grad);
  Tensor dq = new_like(q, q.dim(), {}, ScalarType::Float), dk = new_like(k, k.dim(), {}, ScalarType::Float),
         dv = new_like(v, v.dim(), {}, ScalarType::Float),
         stats = new_like(call.q.keep, 0, {call.T, a.H, 3}, ScalarType::Float);
  const float* g_data = g.const_data_ptr<float>();
  float *dq_data = dq.mutable_data_ptr<float>(), *stats_data = stats.mutable_data_ptr<float>();
  const Kernels& kernel = kernels();
  count_call("attention_backward", kernel.name);

  parallel(call.T, 1, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(static_cast<size_t>(3 * call.B * Call::R));
    for (int64_t t = first; t < last; t++)
      kernel.attention_backward_q(a, g_data, stats_data, dq_data, scratch.data(), t);
  });

  std::vector<std::vector<int32_t>> rows_of(call.B ? call.table.size() / call.B : 0);
  for (int64_t t = 0; t < call.T; t++)
    if (call.row_seq[t] >= 0) rows_of[call.row_seq[t]].push_back(static_cast<int32_t>(t));
  Tensor dk_pages = torch::stable::new_zeros(call.k_cache, call.k_cache.sizes()),
         dv_pages = torch::stable::new_zeros(call.v_cache, call.v_cache.sizes());
  float *dk_cache = dk_pages.mutable_data_ptr<float>(), *dv_cache = dv_pages.mutable_data_ptr<float>();
  const int64_t pages = static_cast<int64_t>(call.page_seq.size());
  parallel(pages * a.k.G, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t page = i / a.k.G;
      const std::vector<int32_t>& rows = rows_of[call.page_seq[page]];
      kernel.attention_backward_kv(a, g_data, stats_data, i % a.k.G, page, call.page_block[page] * Call::R, rows.data(),
                                   static_cast<int64_t>(rows.size()), dk_cache, dv_cache);
    }
  });

  const auto gather = [&](const float* cache, int64_t D, float* out) {
    for (int64_t s = 0; s < call.S; s++)
      for (int64_t h = 0; h < a.k.G; h++) {
        float* to = out + (s * a.k.G + h) * D;
        const int64_t slot = call.slots[s];
        if (slot < 0)
          std::fill_n(to, D, 0.0f);
        else
          std::copy_n(cache + ((slot / Call::R * a.k.G + h) * Call::R + slot % Call::R) * D, D, to);
      }
  };
  gather(dk_cache, a.k.D, dk.mutable_data_ptr<float>());
  gather(dv_cache, a.v.D, dv.mutable_data_ptr<float>());
  return {as_dtype(dq, q.scalar_type()), as_dtype(dk, k.scalar_type()), as_dtype(dv, v.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace dasllama
