// Binding of quant_linear; formula, order of the sums and layouts in ops/quant_linear.py. Integer types in native mode go
// to the integer matmul (kernels/matmul_int.inl, matmul_int_scalar.inl), all else to quant_linear_float.h. Several weights
// may take one rounding of x: see shared_activation.h.
#include <algorithm>

#include "packed.h"
#include "quant_linear_float.h"
#include "shared_activation.h"

namespace dasllama {
namespace {

thread_local std::optional<SharedActivation> shared_activation;

constexpr int64_t kActivationBytes = int64_t{8} << 20;  // rows of x are taken in windows of about this size
constexpr int64_t kTaskRows = 64;                       // a task has at least so many rows of x, if there are as many
constexpr int64_t kTaskBytes = 32 << 10;                // a thread is worth waking for so many bytes of weights

void matmul_window(const Kernels& k, const IntMatmul& p, int strip, int64_t rows) {
  const int64_t strips = (p.N + strip - 1) / strip;
  // Where strips alone do not give every thread several tasks, rows are cut too; each cut unpacks the weights again.
  const int64_t cuts = std::clamp<int64_t>(strips < 16 ? rows / kTaskRows : 1, 1, 16);
  const int64_t cut_rows = (rows + cuts - 1) / cuts;
  const int64_t task_bytes = strip * p.row_bytes * std::min<int64_t>(cut_rows, 1 << 10);
  parallel(strips * cuts, 1 + kTaskBytes / (task_bytes + 1), [&](int64_t begin, int64_t end) {
    while (begin < end) {  // neighbouring strips of one cut go to the kernel together
      const int64_t cut = begin / strips, first = begin % strips, last = std::min(strips, first + end - begin);
      const int64_t m = cut * cut_rows;
      k.integer->matmul(p, first * strip, std::min(p.N, last * strip), m, std::min(rows, m + cut_rows));
      begin += last - first;
    }
  });
}

void quant_linear_int(const Tensor& x, const Tensor& qweight, int qtype, const std::optional<Tensor>& bias, Tensor& y,
                      int64_t M, int64_t N, int64_t K) {
  const int lattice = type_info(qtype).lattice, unit = type_info(lattice).block;
  const IntTraits wanted = kernels().integer->traits(qtype);
  const int group = wanted.group;
  const int64_t window = std::clamp<int64_t>(kActivationBytes / (1 + ActivationScratch::row_bytes(K, group, unit)), 256,
                                             std::max<int64_t>(M, 256));
  // Only a whole x can be shared: of a longer one the scratch holds a window.
  SharedActivation* const shared = M <= window ? SharedActivation::current() : nullptr;
  const ActivationScratch* const found = shared ? shared->find(x, K, lattice, wanted) : nullptr;
  const bool is_rounded = found != nullptr;
  const ActivationScratch scratch = found ? *found : ActivationScratch(x, std::min(window, M), K, group, unit);
  const float *in = x.const_data_ptr<float>(), *b = bias ? bias->const_data_ptr<float>() : nullptr;
  const uint8_t* w = qweight.const_data_ptr<uint8_t>();
  const int64_t row_bytes = qweight.size(1);
  float* out = y.mutable_data_ptr<float>();
  const IntActivation arrays = scratch.arrays;
  perform({x, qweight, bias ? *bias : x, y, scratch.memory}, [=] {
    const Kernels& k = kernels();
    const IntTraits traits = k.integer->traits(qtype);
    count_call("quant_linear", k.name);
    for (int64_t first = 0; first < M; first += window) {
      const int64_t rows = std::min(window, M - first);
      if (!is_rounded)
        parallel(rows, 1 + (1 << 14) / (1 + K), [&](int64_t begin, int64_t end) {
          k.prepare_activation(in + first * K, lattice, traits, K, arrays, begin, end);
        });
      matmul_window(k, {arrays, w, row_bytes, qtype, b, out + first * N, N, K, nullptr}, traits.strip, rows);
    }
  });
  if (shared && !found) shared->keep(x, lattice, wanted, scratch);
}

Tensor quant_linear(const Tensor& x, const Tensor& qweight, int64_t qtype, const std::optional<Tensor>& bias,
                    bool native) {
  const TypeInfo type = checked_matrix("quant_linear", qweight, qtype);
  const int64_t N = qweight.size(0), K = qweight.size(1) / type.bytes * type.block;
  DASLLAMA_CHECK(is_floating(x) && x.dim() >= 1 && x.size(-1) == K, "quant_linear",
                 "x must be f32, f16 or bf16 [..., ", K, "] for this qweight in ", type.name, ", found ", shape_text(x));
  DASLLAMA_CHECK(x.device() == qweight.device() && (!bias || bias->device() == x.device()), "quant_linear",
                 "x, qweight and bias must be on one device");
  DASLLAMA_CHECK(!bias || (bias->scalar_type() == ScalarType::Float && bias->dim() == 1 && bias->size(0) == N &&
                           bias->is_contiguous()),
                 "quant_linear", "bias must be contiguous f32 [", N, "], found ", shape_text(*bias));
  int64_t M = 1;
  for (int64_t i = 0; i + 1 < x.dim(); i++) M *= x.size(i);
  const Tensor x32 = as_f32(x);
  Tensor y = torch::stable::new_empty(x32, with_last(x, N));
  if (native && type.block > 1)
    quant_linear_int(x32, qweight, static_cast<int>(qtype), bias, y, M, N, K);
  else
    quant_linear_float(x32, qweight, static_cast<int>(qtype), bias, native, y, M, N, K);
  return as_dtype(y, x.scalar_type());
}

}  // namespace

SharedActivation* SharedActivation::current() { return shared_activation ? &*shared_activation : nullptr; }

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("quant_linear", TORCH_BOX(&quant_linear)); }

}  // namespace dasllama

// Begins or ends sharing on the calling thread. What was kept is let go.
extern "C" __attribute__((visibility("default"))) void dasllama_share_activations(int on) {
  dasllama::shared_activation.reset();
  if (on) dasllama::shared_activation.emplace();
}
