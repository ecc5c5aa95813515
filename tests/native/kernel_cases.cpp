// Calls the kernels of a table on inputs of its own and writes what comes out, so that the tables of two processors can
// be compared. Inputs are made of integers and powers of two: the same bits wherever this runs. Results start as NaN,
// and nearly all sizes are no multiple of a vector or a tile.
//
// Weights come from a file: of each type, int32 type, N, K and row_bytes, and the bytes of N rows. Results go into
// another: records of a line with name and length, and as many bytes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../../ops/csrc/generated/ggml_types.h"
#include "../../ops/csrc/kernels.h"

namespace dasllama {
namespace {

typedef std::vector<float> Floats;
typedef std::vector<int64_t> Ids;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Weight {
  int32_t type, N, K, row_bytes;
  std::vector<uint8_t> rows;

  bool packed() const { return type != types::F32 && type != types::F16 && type != types::BF16; }
};

struct Cases {
  const Kernels& k;
  std::vector<Weight> weights;
  FILE* results;
  uint64_t state = 1;

  uint32_t random() {  // Knuth's MMIX generator
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 32);
  }
  // In (-scale, scale), most of them small; scale is a power of two.
  Floats floats(int64_t n, float scale = 4) {
    Floats v(static_cast<size_t>(n));
    for (float& f : v) {
      const float a = static_cast<float>(static_cast<int32_t>(random()) >> 8) * 0x1p-23f;
      f = a * (static_cast<float>(random() >> 8) * 0x1p-24f) * scale;
    }
    return v;
  }
  static Floats blank(int64_t n) { return Floats(static_cast<size_t>(n), kNaN); }

  template <class T, class... Part>
  void put(const std::vector<T>& v, const char* name, Part... parts) {
    std::string line = name;
    ((line += " " + std::to_string(parts)), ...);
    std::fprintf(results, "%s %zu\n", line.c_str(), v.size() * sizeof(T));
    std::fwrite(v.data(), sizeof(T), v.size(), results);
  }

  void norms() {
    for (int64_t C : {1, 15, 16, 33, 100})
      for (bool weighted : {false, true}) {
        const int64_t rows = 3, stride = C + 3;
        const Floats x = floats(rows * stride), w = floats(C), grad = floats(rows * C);
        Floats y = blank(rows * C), dx = y;
        k.rms_norm(x.data(), stride, weighted ? w.data() : nullptr, 1e-5f, C, y.data(), 0, rows);
        k.rms_norm_backward(grad.data(), x.data(), weighted ? w.data() : nullptr, 1e-5f, C, dx.data(), 0, rows);
        put(y, "rms_norm", C, weighted);
        put(dx, "rms_norm_backward", C, weighted);
      }
  }

  void decoding() {
    const Ids ids = {2, 0, 2};
    for (const Weight& w : weights) {
      Floats all = blank(w.N * w.K), some = blank(3 * w.K);
      for (int64_t n = 0; n < w.N; n++)
        k.dequantize(w.type, w.rows.data() + n * w.row_bytes, w.K, all.data() + n * w.K);
      k.embedding(w.type, w.rows.data(), w.row_bytes, ids.data(), 1.7f, w.K, some.data(), 0, 3);
      put(all, "dequantize", w.type);
      put(some, "embedding", w.type);
    }
  }

  void rounding() {
    // Ordinary rows, halves, zeros, a minus as the largest, f16's ends, and what is no number.
    const int64_t K = 256, rows = 8;
    Floats x = floats(rows * K);
    for (int64_t i = 0; i < K; i++) {
      x[K + i] = static_cast<float>(i - 127) * 0.5f;
      x[2 * K + i] = i % 2 ? 0.0f : -0.0f;
      x[3 * K + i] = -std::fabs(x[3 * K + i]);
      x[4 * K + i] *= 0x1p-24f;
      x[5 * K + i] *= 0x1p14f;
    }
    x[6 * K + 5] = kNaN;
    x[7 * K + 9] = -INFINITY;
    for (int lattice : {types::Q8_0, types::Q8_1, types::Q8_K}) {
      const int64_t row_bytes = K / type_info(lattice).block * type_info(lattice).bytes;
      std::vector<uint8_t> blocks(static_cast<size_t>(rows * row_bytes), 255);
      // Without infinity on Q8_1, whose sum it makes a NaN of the processor's own sign.
      k.quantize_activation(lattice, x.data(), K, blocks.data(), row_bytes, 0, rows - (lattice == types::Q8_1));
      put(blocks, "quantize_activation", lattice);
    }
    for (int type : {types::F32, types::F16, types::BF16, types::Q8_0, types::Q4_0}) {
      std::vector<uint8_t> blocks(static_cast<size_t>(rows * K / type_info(type).block * type_info(type).bytes), 255);
      k.quantize(type, x.data(), rows * K, blocks.data());
      put(blocks, "quantize", type);
    }
    for (int type : {types::F32, types::F16, types::BF16}) {
      Floats y = blank(6 * K);
      k.round_floats(type, x.data(), y.data(), 0, 6 * K - 3);
      put(y, "round_floats", type);
    }
  }

  void ropes() {
    const int64_t T = 3, axes_n = 3, heads = 2;
    const Ids positions = {0, 1, 2, 70000, 5, 17, 131071, 262143, 3};
    for (int64_t half : {5, 16, 37}) {
      const int64_t dim = 2 * half + 3;
      std::vector<int32_t> axes(static_cast<size_t>(half));
      for (int32_t& axis : axes) axis = static_cast<int32_t>(random() % 3);
      const Floats frequency = floats(half, 1), x = floats(T * heads * dim);
      Floats cosines = blank(T * half), sines = cosines, y = blank(T * heads * dim);
      k.rope_tables(positions.data(), axes_n, axes.data(), frequency.data(), 1.25f, half, cosines.data(), sines.data(),
                    0, T);
      k.rope(x.data(), heads * dim, dim, cosines.data(), sines.data(), heads, dim, half, y.data(), 0, T);
      put(cosines, "rope_tables cos", half);
      put(sines, "rope_tables sin", half);
      put(y, "rope", half);
    }
  }

  void elementwise() {
    const int64_t rows = 3, C = 37, n = rows * C;
    const Floats gate = floats(n, 128), up = floats(n, 16), grad = floats(n);
    for (int64_t act = 0; act < 4; act++) {
      Floats y = blank(n), dgate = y, dup = y;
      k.gated_act(gate.data(), C, up.data(), C, act, C, y.data(), 0, rows);
      k.gated_act_backward(grad.data(), gate.data(), up.data(), act, dgate.data(), dup.data(), 0, n);
      put(y, "gated_act", act);
      put(dgate, "gated_act_backward gate", act);
      put(dup, "gated_act_backward up", act);
    }
    Floats y = blank(n), dx = y;
    k.softcap(gate.data(), 30, y.data(), 0, n);
    k.softcap_backward(grad.data(), y.data(), 30, dx.data(), 0, n);
    put(y, "softcap");
    put(dx, "softcap_backward");
  }

  void sampling() {
    const int64_t V = 5003;
    Floats logits = floats(V, 16);
    for (size_t i = 0; i < logits.size(); i += 3) logits[i] = 0.5f;
    Floats kept = blank(sample_floats(V)), band = kept, spare = kept, other_spare = kept;
    const auto B = static_cast<size_t>(sample_blocks(V));
    std::vector<int32_t> ids(static_cast<size_t>(V)), equals(B);
    std::vector<double> blocks(B);
    std::vector<SamplePart> parts(B);
    const Ids changed = {0, 1024, 5002};
    const Floats changed_to = {0.5f, -2, 15};
    for (int64_t top_k : {0, 40, 2000})
      for (double top_p : {1.0, 0.9, 0.3})
        for (double min_p : {0.0, 0.05}) {
          Ids tokens;
          for (double temp : {0.0, 0.7, 3.0})
            for (double draw = 0; draw < 1; draw += 0x1p-5)
              tokens.push_back(k.sample_token({logits.data(), V, temp, top_k, top_p, min_p, draw, 3, changed.data(),
                                               changed_to.data(), kept.data(), band.data(),
                                               {spare.data(), other_spare.data()}, ids.data(), blocks.data(),
                                               parts.data(), equals.data()}));
          put(tokens, "sample_token", top_k, top_p, min_p);
        }
  }

  void experts() {
    const int64_t rows = 3, E = 21, top = 4, C = 37;
    const Floats logits = floats(rows * E), bias = floats(E), grad = floats(rows * top);
    for (int64_t gate : {0, 1})
      for (bool renormalize : {false, true}) {
        Floats weights = blank(rows * top), dlogits = blank(rows * E);
        Ids ids(static_cast<size_t>(rows * top), -1);
        k.moe_router(logits.data(), E, gate ? bias.data() : nullptr, E, top, gate, renormalize, 2.5f, weights.data(),
                     ids.data(), 0, rows);
        k.moe_router_backward(grad.data(), logits.data(), ids.data(), E, top, gate, renormalize, 2.5f, dlogits.data(),
                              0, rows);
        put(weights, "moe_router", gate, renormalize);
        put(ids, "moe_router ids", gate, renormalize);
        put(dlogits, "moe_router_backward", gate, renormalize);
      }
    const Floats y = floats(rows * top * C), out_grad = floats(rows * C);
    Floats out = blank(rows * C), dy = blank(rows * top * C), dweights = blank(rows * top);
    k.moe_combine(y.data(), grad.data(), top, C, out.data(), 0, rows);
    k.moe_combine_backward(out_grad.data(), y.data(), grad.data(), top, C, dy.data(), dweights.data(), 0, rows);
    put(out, "moe_combine");
    put(dy, "moe_combine_backward y");
    put(dweights, "moe_combine_backward weights");
  }

  // Two sequences of 300 keys over pages of R; six rows of the first and one of the second, some with a window.
  void attention(int64_t D, int64_t Dv, int64_t R, int k_codec, int v_codec, float softcap, bool with_sinks) {
    const int64_t keys = 300, H = 6, G = 2, B = (keys + R - 1) / R, P = 2 * B, T = 7, slots_n = 2 * B * R;
    std::vector<int32_t> table(static_cast<size_t>(P));
    for (int64_t i = 0; i < P; i++) table[static_cast<size_t>(i)] = static_cast<int32_t>(P - 1 - i);
    Ids slots(static_cast<size_t>(slots_n), -1);
    for (int64_t i = 0; i < slots_n; i++)
      if (i % (B * R) < keys) slots[static_cast<size_t>(i)] = table[static_cast<size_t>(i / R)] * R + i % R;
    const auto fill = [&](std::vector<uint8_t>& bytes, int codec, int64_t dim) {
      const int64_t page = G * R * kv_cache(nullptr, codec, 0, G, R, dim).row_bytes;
      bytes.assign(static_cast<size_t>(P * page), 255);
      const KVCache cache = kv_cache(bytes.data(), codec, page, G, R, dim);
      const Floats x = floats(slots_n * G * dim);
      Floats back = blank(slots_n * G * dim);
      k.kv_write(x.data(), G * dim, dim, slots.data(), cache, 0, slots_n);
      k.kv_read(cache, slots.data(), back.data(), 0, slots_n);
      put(bytes, "kv_write", dim, R, codec);
      put(back, "kv_read", dim, R, codec);
      return cache;
    };
    std::vector<uint8_t> k_bytes, v_bytes;
    const KVCache k_cache = fill(k_bytes, k_codec, D), v_cache = fill(v_bytes, v_codec, Dv);
    const std::vector<int32_t> row_seq = {0, 0, 0, 0, 0, 0, 1}, row_begin = {0, 3, 17, 0, 250, 130, 5},
                               row_end = {keys, 20, 300, 65, 299, 290, 299};
    const Floats q = floats(T * H * D), sinks = floats(H), grad = floats(T * H * Dv);
    Floats out = blank(T * H * Dv);
    const AttentionArgs a = {q.data(), H * D, D, k_cache, v_cache, H, table.data(), B, row_seq.data(), row_begin.data(),
                             row_end.data(), 0.125f, softcap, with_sinks ? sinks.data() : nullptr, out.data(), k.integer};
    for (const AttentionTile tile : {AttentionTile{0, 1}, AttentionTile{1, 5}, AttentionTile{6, 1}})
      for (int64_t g = 0; g < G; g++) {
        const int64_t vectors = tile.rows * H / G;
        Floats total = blank(attention_state(a, vectors)), scratch = blank(attention_scratch(a, vectors));
        for (size_t i = 0; i < total.size(); i++) total[i] = i < static_cast<size_t>(vectors) ? -INFINITY : 0;
        k.attention_queries(a, tile, g, scratch.data());
        for (int64_t split = 0; split * kAttentionSplit < keys; split++) {
          Floats part = blank(attention_state(a, vectors));
          k.attention_split(a, tile, g, split, part.data(), scratch.data());
          put(part, "attention_split", D, R, k_codec, v_codec, tile.row, g, split);
          k.attention_merge(a, tile, part.data(), total.data());
        }
        k.attention_finish(a, tile, g, total.data());
      }
    put(out, "attention", D, R, k_codec, v_codec);
    if (k_codec != kv::F32) return;

    Floats stats = blank(T * H * 3), dq = blank(T * H * D), scratch = blank(3 * keys);
    for (int64_t row = 0; row < T; row++)
      k.attention_backward_q(a, grad.data(), stats.data(), dq.data(), scratch.data(), row);
    Floats dk(k_bytes.size() / 4), dv(v_bytes.size() / 4);
    const std::vector<int32_t> rows = {0, 1, 2, 3, 4, 5, 6};
    for (int64_t i = 0; i < P; i++)
      for (int64_t g = 0; g < G; g++)
        k.attention_backward_kv(a, grad.data(), stats.data(), g, table[static_cast<size_t>(i)], i % B * R,
                                rows.data() + (i < B ? 0 : 6), i < B ? 6 : 1, dk.data(), dv.data());
    put(stats, "attention_backward_q stats", D);
    put(dq, "attention_backward_q", D);
    put(dk, "attention_backward_kv k", D);
    put(dv, "attention_backward_kv v", D);
  }

  void convolution() {
    const int64_t T = 9, C = 37, K = 4, begin = 3;
    const Ids rows = {0, 1, 2, 5, 6, 8};
    const int64_t n = static_cast<int64_t>(rows.size());
    const Floats x = floats(T * C), weight = floats(C * K), grad = floats(T * C);
    Floats state = floats((K - 1) * C), out = blank(T * C), dx = out, dz = out, scratch = blank(K * C);
    const ConvArgs a = {x.data(), C, weight.data(), C, K, out.data()};
    const ConvArgs back = {x.data(), C, weight.data(), C, K, dx.data()};
    k.causal_conv1d_backward(back, grad.data(), rows.data(), n, state.data(), begin, C, dz.data(), scratch.data());
    k.causal_conv1d(a, rows.data(), n, state.data(), begin, C, scratch.data());
    put(dx, "causal_conv1d_backward");
    put(out, "causal_conv1d");
    put(state, "causal_conv1d state");
  }

  void delta(int64_t Dk, int64_t Dv) {
    const int64_t T = 40, H = 4, G = 2;
    const Floats in_a = floats(T * H), in_b = floats(T * H), decay = floats(H, 1), dt = floats(H), dg = floats(T * H);
    Floats g = blank(T * H), beta = g, da = g, db = g;
    const DeltaGatesArgs gates = {in_a.data(), in_b.data(), H, H, decay.data(), dt.data(), H};
    k.delta_gates(gates, g.data(), beta.data(), 0, T);
    k.delta_gates_backward(gates, dg.data(), in_b.data(), da.data(), db.data(), 0, T);
    put(g, "delta_gates g", Dk);
    put(beta, "delta_gates beta", Dk);
    put(da, "delta_gates_backward a", Dk);
    put(db, "delta_gates_backward b", Dk);

    for (float& f : g) f = -std::fabs(f);
    const Floats q = floats(T * G * Dk), key = floats(T * G * Dk), v = floats(T * H * Dv), grad = floats(T * H * Dv);
    Floats states = floats(H * Dk * Dv), out = blank(T * H * Dv);
    Floats dq(q.size()), dkey(q.size()), dv = out, dfade = blank(T * H), dbeta = dfade;
    const DeltaArgs a = {q.data(), key.data(), v.data(), G * Dk, Dk, G * Dk, Dk, H * Dv, Dv,
                         g.data(), beta.data(), G, H, Dk, Dv, out.data()};
    Ids rows(static_cast<size_t>(T));
    for (int64_t t = 0; t < T; t++) rows[static_cast<size_t>(t)] = t;
    for (int64_t h = 0; h < H; h++) {
      float* M = states.data() + h * Dk * Dv;
      Floats back = blank(delta_backward_scratch(a, T)), scratch = blank(delta_scratch(a));
      k.gated_delta_rule_backward(a, grad.data(), rows.data(), T, h, M,
                                  {dq.data(), dkey.data(), dv.data(), dfade.data(), dbeta.data()}, back.data());
      k.gated_delta_rule(a, rows.data(), T - 1, h, M, scratch.data());
      k.gated_delta_rule(a, rows.data() + T - 1, 1, h, M, scratch.data());
    }
    put(out, "gated_delta_rule", Dk);
    put(states, "gated_delta_rule state", Dk);
    put(dq, "gated_delta_rule_backward q", Dk);
    put(dkey, "gated_delta_rule_backward k", Dk);
    put(dv, "gated_delta_rule_backward v", Dk);
    put(dfade, "gated_delta_rule_backward g", Dk);
    put(dbeta, "gated_delta_rule_backward beta", Dk);
  }

  // Rows of y that the M rows of x make.
  static Ids backwards(int64_t M) {
    Ids rows;
    for (int64_t m = M - 1; m >= 0; m--) rows.push_back(m);
    return rows;
  }

  void float_products() {
    for (const Weight& w : weights) {
      const Floats bias = floats(w.N);
      for (int64_t M : {1, 2, 3, 7}) {
        const Floats x = floats(M * w.K), grad = floats(M * w.N);
        const Ids rows = backwards(M);
        Floats y = blank(M * w.N), dx = blank(M * w.K);
        k.matmul_float({x.data(), w.K, w.rows.data(), w.row_bytes, w.type, M % 2 ? bias.data() : nullptr, y.data(), w.N,
                        M, w.K, M % 2 ? nullptr : rows.data()},
                       0, w.N);
        k.matmul_float_backward({grad.data(), w.rows.data(), w.row_bytes, w.type, dx.data(), M, w.N, w.K}, 0, w.K);
        put(y, "matmul_float", w.type, M);
        put(dx, "matmul_float_backward", w.type, M);
      }
    }
  }

  // Activations are laid out as each table wants them, so only their products can be compared.
  void integer_products() {
    for (const Weight& w : weights) {
      if (!w.packed()) continue;
      const IntTraits traits = k.integer->traits(w.type);
      const int lattice = type_info(w.type).lattice;
      const Floats bias = floats(w.N);
      for (int64_t M : {1, 2, 3, 4, 5, 6, 7, 8, 9, 33}) {
        const Floats x = floats(M * w.K);
        const Ids rows = backwards(M);
        std::vector<int8_t> q(static_cast<size_t>(M * w.K));
        Floats d = blank(M * w.K / 32), s = d;
        std::vector<int16_t> sums(static_cast<size_t>(M * w.K / traits.group));
        std::vector<int32_t> init(sums.size());
        const IntActivation a = {q.data(), d.data(), s.data(), sums.data(), init.data()};
        k.prepare_activation(x.data(), lattice, traits, w.K, a, 0, M);
        put(q, "prepare_activation q", w.type, M);
        put(d, "prepare_activation d", w.type, M);
        Floats y = blank(M * w.N);
        const IntMatmul p = {a, w.rows.data(), w.row_bytes, w.type, M % 2 ? bias.data() : nullptr, y.data(), w.N, w.K,
                             M % 2 ? nullptr : rows.data()};
        const int64_t middle = std::min<int64_t>(traits.strip, w.N);  // two tasks
        k.integer->matmul(p, 0, middle, 0, M);
        k.integer->matmul(p, middle, w.N, 0, M);
        put(y, "integer matmul", w.type, M);
      }
    }
  }

  void run() {
    norms();
    decoding();
    rounding();
    ropes();
    elementwise();
    sampling();
    experts();
    attention(64, 64, 64, kv::F16, kv::F16, 0, false);
    attention(40, 24, 16, kv::F16, kv::F16, 30, true);
    attention(64, 64, 64, kv::F32, kv::F32, 0, true);
    attention(40, 24, 16, kv::F32, kv::F32, 30, false);
    attention(64, 64, 64, kv::Q8_0, kv::Q8_0, 0, false);
    attention(128, 256, 64, kv::TQ4, kv::TQ4, 0, true);
    attention(40, 72, 16, kv::Q8_0, kv::TQ4, 30, true);
    attention(96, 33, 64, kv::TQ4, kv::Q8_0, 0, false);
    convolution();
    delta(24, 40);
    delta(16, 64);
    float_products();
    integer_products();
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int run_kernel_cases(const Kernels* table, const char* weights_path,
                                                                       const char* results_path) {
  FILE *in = std::fopen(weights_path, "rb"), *out = std::fopen(results_path, "wb");
  if (!in || !out) return 1;
  Cases cases = {*table, {}, out};
  int32_t head[4];
  while (std::fread(head, sizeof head, 1, in) == 1) {
    Weight w = {head[0], head[1], head[2], head[3], std::vector<uint8_t>(static_cast<size_t>(head[1]) * head[3])};
    if (std::fread(w.rows.data(), w.rows.size(), 1, in) != 1) return 1;
    cases.weights.push_back(std::move(w));
  }
  std::fclose(in);
  cases.run();
  return std::fclose(out);
}

}  // namespace dasllama

#if defined(KERNEL_CASES_MAIN)
// WEIGHTS RESULTS: runs the best table of this processor and prints its name.
int main(int, char** argv) {
  std::puts(dasllama::kernels().name);
  return dasllama::run_kernel_cases(&dasllama::kernels(), argv[1], argv[2]);
}
#endif
