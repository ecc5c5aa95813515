// Binding of causal_conv1d, causal_conv1d_update and causal_conv1d_backward; semantics in ops/causal_conv1d.py, loops
// in kernels/causal_conv1d.inl.
#include "sequences.h"
#include "views.h"

namespace dasllama {
namespace {

constexpr int64_t kChannels = 256;  // of a task

void check_conv(const Tensor& x, const Tensor& weight, const Tensor& state) {
  DASLLAMA_CHECK(is_floating(x) && x.dim() >= 1, "causal_conv1d", "x must be a floating tensor of rank 1 or more");
  const int64_t C = x.size(-1);
  DASLLAMA_CHECK(weight.scalar_type() == ScalarType::Float && weight.dim() == 2 && weight.size(0) == C &&
                     weight.size(1) >= 1 && weight.is_contiguous(),
                 "causal_conv1d", "weight must be contiguous f32 [", C, ", taps]");
  DASLLAMA_CHECK(state.scalar_type() == ScalarType::Float && state.dim() == 3 && state.size(1) == weight.size(1) - 1 &&
                     state.size(2) == C && state.is_contiguous(),
                 "causal_conv1d", "state must be contiguous f32 [sequences, ", weight.size(1) - 1, ", ", C, "]");
}

// f(sequence, first channel, last channel), shared among threads so that each gets a part of every sequence's channels.
template <class F>
void by_channels(const Sequences& sequences, int64_t rows, int64_t C, int64_t K, const F& f) {
  const int64_t n = static_cast<int64_t>(sequences.all.size()), blocks = (C + kChannels - 1) / kChannels;
  if (!n) return;
  parallel(n * blocks, 1 + 8192 / (rows / n * kChannels * K + 1), [&](int64_t begin, int64_t end) {
    float* scratch = static_cast<float*>(thread_scratch(static_cast<size_t>(K * kChannels) * sizeof(float)));
    for (int64_t i = begin; i < end; i++) {
      const int64_t first = i / n * kChannels;
      f(sequences.all[i % n], first, std::min(C, first + kChannels), scratch);
    }
  });
}

Tensor convolve(const char* op, const char* name, const Tensor& x, const Tensor& weight, const Tensor& state,
                const Tensor& ids) {
  const Rows in(x);
  const int32_t* id = ids_of(op, name, ids, in.rows);
  Tensor y = new_like(x, x.dim(), {}, ScalarType::Float);
  const ConvArgs a = {in.data, in.stride, weight.const_data_ptr<float>(), in.C, weight.size(1),
                      y.mutable_data_ptr<float>()};
  const int64_t T = in.rows, n_states = state.size(0);
  float* states = state.mutable_data_ptr<float>();
  perform({in.keep, weight, state, ids, y}, [=] {
    check_ids(op, name, id, T, n_states);
    for (int64_t t = 0; t < T; t++)
      if (id[t] < 0) std::fill_n(a.out + t * a.C, a.C, 0.0f);
    const Kernels& k = kernels();
    count_call(op, k.name);
    by_channels({id, T}, T, a.C, a.K, [&](const Sequences::One& s, int64_t begin, int64_t end, float* scratch) {
      k.causal_conv1d(a, s.rows, s.n, states + s.state * (a.K - 1) * a.C, begin, end, scratch);
    });
  });
  return as_dtype(y, x.scalar_type());
}

Tensor causal_conv1d_update(const Tensor& x, const Tensor& weight, Tensor state, const Tensor& slots) {
  check_conv(x, weight, state);
  return convolve("causal_conv1d_update", "slots", x, weight, state, slots);
}

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const Tensor& row_seq,
                                         const Tensor& state) {
  check_conv(x, weight, state);
  not_recorded("causal_conv1d copies its states");
  Tensor next = torch::stable::clone(state);
  Tensor y = convolve("causal_conv1d", "row_seq", x, weight, next, row_seq);
  return {y, next};
}

Tensor causal_conv1d_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& row_seq,
                              const Tensor& state) {
  check_conv(x, weight, state);
  const Rows in(x);
  DASLLAMA_CHECK(is_floating(grad) && grad.numel() == x.numel(), "causal_conv1d_backward",
                 "grad must have x's ", x.numel(), " elements, found ", grad.numel());
  const int32_t* ids = ids_of("causal_conv1d_backward", "row_seq", row_seq, in.rows);
  check_ids("causal_conv1d_backward", "row_seq", ids, in.rows, state.size(0));
  const Tensor g = as_f32(grad);
  Tensor dx = torch::stable::new_zeros(g, x.sizes(), ScalarType::Float),
         dz = new_like(x, x.dim(), {}, ScalarType::Float);
  const ConvArgs a = {in.data, in.stride, weight.const_data_ptr<float>(), in.C, weight.size(1),
                      dx.mutable_data_ptr<float>()};
  const Sequences sequences(ids, in.rows);
  const float *g_data = g.const_data_ptr<float>(), *states = state.const_data_ptr<float>();
  float* dz_data = dz.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("causal_conv1d_backward", k.name);
  by_channels(sequences, in.rows, a.C, a.K, [&](const Sequences::One& s, int64_t begin, int64_t end, float* scratch) {
    k.causal_conv1d_backward(a, g_data, s.rows, s.n, states + s.state * (a.K - 1) * a.C, begin, end, dz_data, scratch);
  });
  return as_dtype(dx, x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
  m.impl("causal_conv1d_update", TORCH_BOX(&causal_conv1d_update));
  m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward));
}

}  // namespace dasllama
