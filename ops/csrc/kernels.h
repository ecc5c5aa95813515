// The table of CPU kernels: one function pointer per kernel, one table per instruction set. Nothing here knows torch.
//
// A kernel works on raw pointers and on a range of its outermost loop, so that the caller may split it over threads;
// its result does not depend on the split. Every table is total: it serves all that the ops' schemas allow.
// The same source (kernels/*.inl) is compiled once per instruction set unless a kernel has an own, faster variant.
#pragma once
#include "kv_codecs.h"
#include "matmul_int.h"

namespace dasllama {

// What one call of paged attention works on. Rows t < T, vectors of a row: its H heads. Strides in elements.
struct AttentionArgs {
  const float* q;          // [T, H, D], the last dimension contiguous
  int64_t q_row, q_head;   // strides
  KVCache k, v;            // of the same pages; D = k.D, Dv = v.D
  int64_t H;
  const int32_t* block_table;  // [S, B] pages
  int64_t B;
  const int32_t *row_seq, *row_begin, *row_end;  // [T]: a row sees the keys [begin, end) of its sequence
  float scale, softcap;    // softcap 0: none
  const float* sinks;      // [H] or null
  float* out;              // [T, H, Dv] contiguous
  const IntKernels* integer;  // for products with the codes of packed keys
};

// Rows [row, row + rows) of one sequence.
struct AttentionTile {
  int64_t row, rows;
};

constexpr int64_t kAttentionBlock = 64, kAttentionSplit = 256;  // keys; part of the numbers' definition
constexpr int64_t kAttentionPad = 16;  // elements after each row of scratch: strides of powers of two share cache sets
constexpr int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }
// Floats of a state and of the scratch of `vectors` = rows * H / G query vectors.
inline int64_t attention_state(const AttentionArgs& a, int64_t vectors) { return vectors * (a.v.width + 2); }
inline int64_t attention_scratch(const AttentionArgs& a, int64_t vectors) {
  return vectors * (a.k.width + kAttentionBlock + 2) +
         kAttentionBlock * (a.k.width + a.v.width + 2 * kAttentionPad) +
         (a.v.packed() ? kAttentionBlock * (vectors + a.v.width / 32) : 0);
}

// y[m, n] = sum over k of x[m, k] * w[n, k], + bias[n]: f32 with strides in elements, w packed rows of type qtype; row m
// of x makes row rows[m] of y, or m where rows is null.
struct FloatMatmul {
  const float* x;
  int64_t x_stride;
  const uint8_t* w;
  int64_t row_bytes;
  int qtype;
  const float* bias;  // [N] or null
  float* y;
  int64_t y_stride;
  int64_t M, K;
  const int64_t* rows;
};

// dx[m, k] = sum over n of grad[m, n] * w[n, k]: contiguous f32, w packed rows of type qtype.
struct FloatMatmulBackward {
  const float* grad;
  const uint8_t* w;
  int64_t row_bytes;
  int qtype;
  float* dx;
  int64_t M, N, K;
};

// Causal depthwise convolution: rows of C channels, a stride between rows of x in elements.
struct ConvArgs {
  const float* x;  // [T, C]
  int64_t x_row;
  const float* weight;  // [C, K]
  int64_t C, K;
  float* out;  // [T, C] contiguous
};

// Rows of H heads, with strides in elements.
struct DeltaGatesArgs {
  const float *a, *b;  // [T, H]
  int64_t a_row, b_row;
  const float *decay, *dt_bias;  // [H]
  int64_t H;
};

// The gated delta rule: strides in elements, each head contiguous.
struct DeltaArgs {
  const float *q, *k, *v;  // [T, G, Dk] twice, [T, H, Dv]
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const float *g, *beta;  // [T, H] contiguous
  int64_t G, H, Dk, Dv;
  float* out;  // [T, H, Dv] contiguous; not for the gradient
};
struct DeltaGradients {
  float *q, *k, *v, *g, *beta;  // contiguous
};
constexpr int64_t kDeltaRows = 32, kDeltaColumns = 64;  // at most, of what is kept in the first-level cache
inline int64_t delta_scratch(const DeltaArgs& a) { return (2 * kDeltaRows + kDeltaColumns) * a.Dk; }
// Rows of a segment of the gradient's way back through n rows, and the floats that it needs.
inline int64_t delta_segment(int64_t n) {
  int64_t length = 1;
  while (length * length < n) length++;
  return length;
}
inline int64_t delta_backward_scratch(const DeltaArgs& a, int64_t n) {
  const int64_t length = delta_segment(n), states = (n + length - 1) / length + length + 2;
  return states * a.Dk * a.Dv + 3 * (a.Dk + a.Dv);
}

// What a block of the vocabulary adds to the band in which a cut is looked for; see kernels/sample_token.inl.
struct SamplePart {
  double from_above;  // mass of its elements above the band
  int64_t end;        // of its elements in the list of those in the band
};
// One draw from logits f32 [V]; see kernels/sample_token.inl.
struct SampleArgs {
  const float* logits;
  int64_t V;
  double temp;
  int64_t top_k;
  double top_p, min_p, draw;
  int64_t penalized;             // number of ids that have another logit than `logits` says:
  const int64_t* penalized_ids;  // these, rising
  const float* penalized_logits;
  float *kept, *band, *spare[2];  // memory for sample_floats(V) each
  int32_t* ids;                   // for V
  double* blocks;                 // this and what follows for sample_blocks(V) each
  SamplePart* parts;
  int32_t* equals;
};
constexpr int64_t kSampleBlock = 1024;  // elements of a sum in f32
constexpr int64_t sample_floats(int64_t V) { return round16(V) + 16; }
constexpr int64_t sample_blocks(int64_t V) { return (V + kSampleBlock - 1) / kSampleBlock; }

struct Kernels {
  const char* name;  // "scalar", "avx2", "avx512vnni", "neon"

  // y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight for rows [begin, end); strides in elements, weight may be null.
  void (*rms_norm)(const float* x, int64_t x_stride, const float* weight, float eps, int64_t C, float* y,
                   int64_t begin, int64_t end);
  void (*rms_norm_backward)(const float* grad, const float* x, const float* weight, float eps, int64_t C, float* dx,
                            int64_t begin, int64_t end);

  // n elements (a whole number of blocks) of any weight type -> f32.
  void (*dequantize)(int qtype, const uint8_t* src, int64_t n, float* y);
  // y[i] = row ids[i] of a packed table, dequantized, times scale, for i in [begin, end); ids are valid.
  void (*embedding)(int qtype, const uint8_t* table, int64_t row_bytes, const int64_t* ids, float scale, int64_t C,
                    float* y, int64_t begin, int64_t end);

  // Rows [begin, end) of x [rows, K] -> blocks of the lattice Q8_0, Q8_1 or Q8_K, row_bytes per row.
  void (*quantize_activation)(int lattice, const float* x, int64_t K, uint8_t* out, int64_t row_bytes, int64_t begin,
                              int64_t end);
  // n elements (a whole number of blocks) -> F32, F16, BF16, Q8_0 or Q4_0.
  void (*quantize)(int qtype, const float* x, int64_t n, uint8_t* out);

  // cos and sin [T, half] of rows [begin, end); frequency i turns with positions[t * n_axes + axes[i]], where axes may
  // be null for all 0.
  void (*rope_tables)(const int64_t* positions, int64_t n_axes, const int32_t* axes, const float* inv_freq, float scale,
                      int64_t half, float* cosines, float* sines, int64_t begin, int64_t end);
  void (*rope)(const float* x, int64_t row_stride, int64_t head_stride, const float* cosines, const float* sines,
               int64_t heads, int64_t dim, int64_t half, float* y, int64_t begin, int64_t end);

  // act 0 SiLU, 1 tanh-GELU, 2 sigmoid, 3 clamped SwiGLU; rows [begin, end) of C elements, or for the gradient
  // elements [begin, end).
  void (*gated_act)(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t act, int64_t C,
                    float* y, int64_t begin, int64_t end);
  void (*gated_act_backward)(const float* grad, const float* gate, const float* up, int64_t act, float* dgate,
                             float* dup, int64_t begin, int64_t end);

  // Rows [begin, end) of logits, E each -> weights and ids [k] of a row; gate 0 softmax, 1 sigmoid, bias [E] or null.
  void (*moe_router)(const float* logits, int64_t stride, const float* bias, int64_t E, int64_t k, int64_t gate,
                     bool renormalize, float scale, float* weights, int64_t* ids, int64_t begin, int64_t end);
  void (*moe_router_backward)(const float* grad, const float* logits, const int64_t* ids, int64_t E, int64_t k,
                              int64_t gate, bool renormalize, float scale, float* dlogits, int64_t begin, int64_t end);
  // Rows [begin, end) of y [rows, k, C] and weights [rows, k] -> [rows, C].
  void (*moe_combine)(const float* y, const float* weights, int64_t k, int64_t C, float* out, int64_t begin,
                      int64_t end);
  void (*moe_combine_backward)(const float* grad, const float* y, const float* weights, int64_t k, int64_t C, float* dy,
                               float* dweights, int64_t begin, int64_t end);

  // y[i] = cap * tanh(x[i] / cap), and x's gradient from y; elements [begin, end).
  void (*softcap)(const float* x, float cap, float* y, int64_t begin, int64_t end);
  void (*softcap_backward)(const float* grad, const float* y, float cap, float* dx, int64_t begin, int64_t end);

  // The token, or -1 for logits that are no distribution.
  int64_t (*sample_token)(const SampleArgs& a);

  // What a core can do at most; see kernels/ceilings.inl.
  int64_t (*read_ceiling)(const uint8_t* p, int64_t n);
  int64_t (*fma_ceiling)(int64_t n);
  int64_t (*dot_ceiling)(int64_t n);

  // Rows [begin, end) of x, G heads of D elements with strides in elements, into a cache; slot = page * R + row or -1.
  void (*kv_write)(const float* x, int64_t row_stride, int64_t head_stride, const int64_t* slots, const KVCache& cache,
                   int64_t begin, int64_t end);
  // Back again, to rows [begin, end) of out [rows, G, D]; zeros where the slot is -1.
  void (*kv_read)(const KVCache& cache, const int64_t* slots, float* out, int64_t begin, int64_t end);

  // What attention_split needs of a tile's queries, at the begin of its scratch.
  void (*attention_queries)(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, float* scratch);
  // A tile's state of one split of keys; adding a split's state to the total of those before it; writing the result.
  void (*attention_split)(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, int64_t split, float* state,
                          float* scratch);
  void (*attention_merge)(const AttentionArgs& a, AttentionTile tile, const float* split, float* total);
  void (*attention_finish)(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, const float* total);

  // Gradients; see kernels/attention_backward.inl. stats f32 [T, H, 3].
  void (*attention_backward_q)(const AttentionArgs& a, const float* grad, float* stats, float* dq, float* scratch,
                               int64_t row);
  void (*attention_backward_kv)(const AttentionArgs& a, const float* grad, const float* stats, int64_t kv_head,
                                int64_t page, int64_t start, const int32_t* rows, int64_t n, float* dk, float* dv);

  // One sequence: n rows of the batch and its state [K - 1, C], which becomes that after them; channels [begin, end).
  // scratch: K * (end - begin) floats. dz: [T, C] for the gradient's own use.
  void (*causal_conv1d)(const ConvArgs& a, const int64_t* rows, int64_t n, float* state, int64_t begin, int64_t end,
                        float* scratch);
  void (*causal_conv1d_backward)(const ConvArgs& a, const float* grad, const int64_t* rows, int64_t n,
                                 const float* state, int64_t begin, int64_t end, float* dz, float* scratch);

  // Rows [begin, end); g, beta, their gradients and results [T, H] contiguous.
  void (*delta_gates)(const DeltaGatesArgs& p, float* g, float* beta, int64_t begin, int64_t end);
  void (*delta_gates_backward)(const DeltaGatesArgs& p, const float* dg, const float* dbeta, float* da, float* db,
                               int64_t begin, int64_t end);

  // One head of one sequence: n rows of the batch and its state [Dk, Dv], which becomes that after them.
  void (*gated_delta_rule)(const DeltaArgs& a, const int64_t* rows, int64_t n, int64_t head, float* state,
                           float* scratch);
  void (*gated_delta_rule_backward)(const DeltaArgs& a, const float* grad, const int64_t* rows, int64_t n,
                                    int64_t head, const float* state, const DeltaGradients& to, float* scratch);

  // Weight rows [begin, end).
  void (*matmul_float)(const FloatMatmul& p, int64_t begin, int64_t end);
  // Columns [begin, end) of dx; begin is a multiple of the type's block, and end too unless it is K.
  void (*matmul_float_backward)(const FloatMatmulBackward& p, int64_t begin, int64_t end);
  // y[i] = x[i] rounded to qtype, one of F32, F16 and BF16, for i in [begin, end); y may be x.
  void (*round_floats)(int qtype, const float* x, float* y, int64_t begin, int64_t end);

  // Rows [begin, end) of x f32 [M, K]: rounds them to a lattice and fills their part of a.
  void (*prepare_activation)(const float* x, int lattice, IntTraits traits, int64_t K, const IntActivation& a,
                             int64_t begin, int64_t end);
  const IntKernels* integer;
};

// The table in force: the best one that this processor runs, or the one that dasllama_set_isa asked for.
const Kernels& kernels();

// Counts one call of `op` served by `variant` (both string literals) for dasllama_report.
void count_call(const char* op, const char* variant);
// The op that the calling thread counted last, or "".
const char* last_counted();

}  // namespace dasllama
