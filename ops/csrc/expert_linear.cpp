// Binding of expert_linear and expert_linear_backward; see ops/expert_linear.py. Rows are grouped by expert, and each
// group goes to the kernels of quant_linear, whose results do not depend on a row's neighbours.
#include <algorithm>
#include <vector>

#include "activation_scratch.h"
#include "packed.h"
#include "views.h"

namespace dasllama {
namespace {

constexpr int64_t kUnpack = 4;         // unpacking a weight costs about as much as multiplying it with so many rows
constexpr int64_t kTaskWork = 1 << 17;  // products for which a thread is worth waking

// The rows of a call, grouped by expert.
struct Groups {
  std::vector<int64_t> rows;   // [R]: rows in the order of the groups, ascending within one
  std::vector<int64_t> begin;  // [E + 1]: where a group begins in `rows`

  template <class Id>
  Groups(const Id* ids, int64_t R, int64_t E) : rows(R), begin(E + 1) {
    for (int64_t i = 0; i < R; i++) begin[ids[i] + 1]++;
    for (int64_t e = 0; e < E; e++) begin[e + 1] += begin[e];
    std::vector<int64_t> at(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < R; i++) rows[at[ids[i]]++] = i;
  }
  int64_t size(int64_t e) const { return begin[e + 1] - begin[e]; }
};

// ids as contiguous int32 or int64.
Tensor checked_ids(const char* op, const Tensor& ids) {
  STD_TORCH_CHECK(ids.is_cpu() && ids.dim() >= 1 &&
                      (ids.scalar_type() == ScalarType::Long || ids.scalar_type() == ScalarType::Int),
                  "dasllama::", op, ": ids must be int64 or int32 [..., k] on the CPU like qweight, found ",
                  shape_text(ids));
  return as_contiguous(ids);
}

Groups grouped(const char* op, const void* ids, bool wide, int64_t n, int64_t E) {
  const auto group = [&](const auto* id) {
    for (int64_t i = 0; i < n; i++)
      STD_TORCH_CHECK(id[i] >= 0 && id[i] < E, "dasllama::", op, ": id ", static_cast<int64_t>(id[i]),
                      " is not one of ", E, " experts");
    return Groups(id, n, E);
  };
  return wide ? group(static_cast<const int64_t*>(ids)) : group(static_cast<const int32_t*>(ids));
}

// Calls f(e, begin, end) on pieces of [0, n) for every group e that has rows, on all threads. A piece begins at a
// multiple of `strip`. Threads get about equal work, K products for each row and element of n.
template <class F>
void for_strips(const Groups& groups, int64_t n, int64_t strip, int64_t K, const F& f) {
  const int64_t E = static_cast<int64_t>(groups.begin.size()) - 1, strips = (n + strip - 1) / strip;
  std::vector<int64_t> start(E + 1);  // of a group's work, in units of a strip and a row
  for (int64_t e = 0; e < E; e++) start[e + 1] = start[e] + (groups.size(e) ? strips * (groups.size(e) + kUnpack) : 0);
  parallel(start[E], 1 + kTaskWork / (strip * K + 1), [&](int64_t begin, int64_t end) {
    // A strip is done by the thread that got its last unit.
    int64_t e = std::upper_bound(start.begin(), start.end(), begin) - start.begin() - 1;
    for (; e < E && start[e] < end; e++) {
      if (!groups.size(e)) continue;
      const int64_t cost = groups.size(e) + kUnpack;
      const int64_t first = std::max<int64_t>(begin - start[e], 0) / cost;
      const int64_t last = std::min(strips, (end - start[e]) / cost);
      if (first < last) f(e, first * strip, std::min(n, last * strip));
    }
  });
}

// Copies the rows of x, of which `share` neighbouring rows of the call read one, into the order of the groups.
void gather(const Groups& groups, const float* x, int64_t share, int64_t K, float* out) {
  parallel(static_cast<int64_t>(groups.rows.size()), 1 + (1 << 16) / (K + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) std::copy_n(x + groups.rows[i] / share * K, K, out + i * K);
  });
}

struct Call {
  const void* ids;  // [R], int64 if `wide`, else int32
  bool wide;
  int64_t R, E;
  const uint8_t* w;  // [E, N, row_bytes]
  int64_t row_bytes;
  int qtype;
  const float* bias;  // [E, N] or null
  const float* x;     // [X, K]
  float* y;           // [R, N]
  int64_t X, share, N, K;

  Groups groups() const { return grouped("expert_linear", ids, wide, R, E); }
};

void expert_linear_int(const Call& c, const ActivationScratch& given, const ActivationScratch& sorted) {
  const Kernels& k = kernels();
  const Groups groups = c.groups();
  const IntTraits traits = k.integer->traits(c.qtype);
  const int lattice = type_info(c.qtype).lattice;
  const int64_t grain = 1 + (1 << 14) / (1 + c.K);
  parallel(c.X, grain, [&](int64_t begin, int64_t end) {
    k.prepare_activation(c.x, lattice, traits, c.K, given.arrays, begin, end);
  });
  parallel(c.R, 4 * grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) sorted.copy_row(i, given, groups.rows[i] / c.share);
  });
  for_strips(groups, c.N, traits.strip, c.K, [&](int64_t e, int64_t begin, int64_t end) {
    const int64_t first = groups.begin[e];
    const IntMatmul p = {sorted.from_row(first), c.w + e * c.N * c.row_bytes, c.row_bytes,
                         c.qtype,                c.bias ? c.bias + e * c.N : nullptr, c.y,
                         c.N,                    c.K,                                 groups.rows.data() + first};
    k.integer->matmul(p, begin, end, 0, groups.size(e));
  });
}

// rows [R, K]: scratch.
void expert_linear_float(const Call& c, bool native, float* rows) {
  const Kernels& k = kernels();
  const Groups groups = c.groups();
  gather(groups, c.x, c.share, c.K, rows);
  if (native && c.qtype != types::F32)
    parallel(c.R * c.K, 1 << 16, [&](int64_t begin, int64_t end) { k.round_floats(c.qtype, rows, rows, begin, end); });
  for_strips(groups, c.N, 4, c.K, [&](int64_t e, int64_t begin, int64_t end) {
    const int64_t first = groups.begin[e];
    const FloatMatmul p = {rows + first * c.K, c.K, c.w + e * c.N * c.row_bytes, c.row_bytes, c.qtype,
                           c.bias ? c.bias + e * c.N : nullptr, c.y, c.N, groups.size(e), c.K,
                           groups.rows.data() + first};
    k.matmul_float(p, begin, end);
  });
}

// The type of qweight u8 [E, N, row_bytes] on the CPU.
TypeInfo checked_stack(const char* op, const Tensor& qweight, int64_t qtype) {
  const TypeInfo type = checked_packed(op, qweight, qtype);
  STD_TORCH_CHECK(qweight.dim() == 3 && qweight.is_contiguous(), "dasllama::", op,
                  ": qweight must be a contiguous [E, N, row_bytes], found ", qweight.is_contiguous() ? "" : "strided ",
                  shape_text(qweight));
  return type;
}

// Whether rows is ids with its last dimension replaced by, or followed by, `width`.
bool has_rows_of(const Tensor& rows, const Tensor& ids, bool shared, int64_t width) {
  if (rows.dim() != ids.dim() + !shared || rows.size(-1) != width) return false;
  for (int64_t d = 0; d + 1 < rows.dim(); d++)
    if (rows.size(d) != ids.size(d)) return false;
  return true;
}

Tensor expert_linear(const Tensor& x, const Tensor& qweight, int64_t qtype, const Tensor& ids,
                     const std::optional<Tensor>& bias, bool native) {
  const TypeInfo type = checked_stack("expert_linear", qweight, qtype);
  const int64_t E = qweight.size(0), N = qweight.size(1), K = qweight.size(2) / type.bytes * type.block;
  const Tensor chosen = checked_ids("expert_linear", ids);
  const bool shared = x.dim() == ids.dim();
  DASLLAMA_CHECK(x.is_cpu() && is_floating(x) && x.dim() >= 1 && has_rows_of(x, ids, shared, K), "expert_linear",
                 "x must be f32, f16 or bf16 [..., ", K, "] or [..., k, ", K, "] on the CPU for ids ", shape_text(ids),
                 " and this qweight in ", type.name, ", found ", shape_text(x));
  DASLLAMA_CHECK(!bias || (bias->is_cpu() && bias->scalar_type() == ScalarType::Float && bias->dim() == 2 &&
                           bias->size(0) == E && bias->size(1) == N && bias->is_contiguous()),
                 "expert_linear", "bias must be contiguous f32 [", E, ", ", N, "] on the CPU, found ",
                 shape_text(*bias));
  const Tensor x32 = as_f32(x);
  Tensor y = new_like(ids, ids.dim(), {N}, ScalarType::Float);
  const int64_t share = shared ? std::max<int64_t>(ids.size(-1), 1) : 1;
  const int64_t R = ids.numel(), X = leading(x, x.dim() - 1);
  const Call call = {chosen.const_data_ptr(),
                     ids.scalar_type() == ScalarType::Long,
                     R,
                     E,
                     qweight.const_data_ptr<uint8_t>(),
                     qweight.size(2),
                     static_cast<int>(qtype),
                     bias ? bias->const_data_ptr<float>() : nullptr,
                     x32.const_data_ptr<float>(),
                     y.mutable_data_ptr<float>(),
                     X,
                     share,
                     N,
                     K};
  const Tensor& keep_bias = bias ? *bias : x32;
  if (native && type.block > 1) {
    const int unit = type_info(type.lattice).block, group = kernels().integer->traits(call.qtype).group;
    const ActivationScratch given(x32, X, K, group, unit), sorted(x32, R, K, group, unit);
    perform({chosen, x32, qweight, keep_bias, y}, [=] {
      count_call("expert_linear", kernels().name);
      expert_linear_int(call, given, sorted);
    });
  } else {
    const Tensor sorted = torch::stable::new_empty(x32, {R, K});
    float* rows = sorted.mutable_data_ptr<float>();
    perform({chosen, x32, qweight, keep_bias, y, sorted}, [=] {
      count_call("expert_linear", kernels().name);
      expert_linear_float(call, native, rows);
    });
  }
  return as_dtype(y, x.scalar_type());
}

Tensor expert_linear_backward(const Tensor& grad, const Tensor& qweight, int64_t qtype, const Tensor& ids,
                              bool shared) {
  const TypeInfo type = checked_stack("expert_linear_backward", qweight, qtype);
  const int64_t E = qweight.size(0), N = qweight.size(1), K = qweight.size(2) / type.bytes * type.block;
  const Tensor chosen = checked_ids("expert_linear_backward", ids);
  const Groups groups = grouped("expert_linear_backward", chosen.const_data_ptr(),
                                ids.scalar_type() == ScalarType::Long, ids.numel(), E);
  DASLLAMA_CHECK(grad.is_cpu() && is_floating(grad) && has_rows_of(grad, ids, false, N), "expert_linear_backward",
                 "grad must be f32, f16 or bf16 [..., k, ", N, "] on the CPU for ids ", shape_text(ids),
                 " and this qweight, found ", shape_text(grad));
  const int64_t R = ids.numel(), row_bytes = qweight.size(2);
  const Tensor g32 = as_f32(grad), sorted = torch::stable::new_empty(g32, {R, N}),
               products = torch::stable::new_empty(g32, {R, K});
  float *g = sorted.mutable_data_ptr<float>(), *by_group = products.mutable_data_ptr<float>();
  gather(groups, g32.const_data_ptr<float>(), 1, N, g);
  const uint8_t* w = qweight.const_data_ptr<uint8_t>();
  const Kernels& k = kernels();
  count_call("expert_linear_backward", k.name);
  for_strips(groups, K, std::max<int64_t>(type.block, 32), N, [&](int64_t e, int64_t begin, int64_t end) {
    const int64_t first = groups.begin[e];
    const FloatMatmulBackward p = {g + first * N,       w + e * N * row_bytes, row_bytes, static_cast<int>(qtype),
                                   by_group + first * K, groups.size(e),        N,         K};
    k.matmul_float_backward(p, begin, end);
  });

  std::vector<int64_t> place(R);  // of a row in the order of the groups
  for (int64_t i = 0; i < R; i++) place[groups.rows[i]] = i;
  Tensor dx = new_like(ids, ids.dim() - shared, {K}, ScalarType::Float);
  float* out = dx.mutable_data_ptr<float>();
  const int64_t share = shared ? ids.size(-1) : 1, rows = leading(dx, dx.dim() - 1);
  parallel(rows, 1 + (1 << 16) / (share * K + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      std::fill_n(out + row * K, K, 0.0f);
      for (int64_t i = row * share; i < (row + 1) * share; i++)
        for (int64_t c = 0; c < K; c++) out[row * K + c] += by_group[place[i] * K + c];
    }
  });
  return as_dtype(dx, grad.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("expert_linear", TORCH_BOX(&expert_linear));
  m.impl("expert_linear_backward", TORCH_BOX(&expert_linear_backward));
}

}  // namespace dasllama
