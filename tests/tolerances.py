"""Every tolerance of the tests, each with its reason. A test takes its bound from here and nowhere else."""

# Summation order of f32 in two implementations, over a few layers; relative to the spread (std) of the logits.
FP32_LOGITS = 1e-4
# ... times this at the norm of a delta net's heads: it magnifies the roundings of heads whose output all but vanishes.
DELTA_NORM = 10
# Distance of fp32 mode from float64, geometric mean over the modules of a published model: times that of transformers
# in f32, which is another with another BLAS.
FP32_PEER = 1.25
# Below this margin between the best two, f32 noise may choose either.
GREEDY_MARGIN = 1e-3

# One activation rounded the other way changes everything after it: the size of llama.cpp's own differences between its
# f16 and f32 caches. Mean |log-probability difference|.
NATIVE_LOGPROB = 0.05
# The same over single tokens of models of random weights, up to 46 layers deep, whose layers add their roundings up.
# Times the case's factor: noise of a lattice's size before every matrix of the fp32 model moves the delta nets as far.
NATIVE_LOGPROB_RANDOM = 0.1

# Published models, native arithmetic against transformers on dequantized weights.
REAL_NLL = 0.003  # relative, mean over a passage
REAL_NLL_RMS = 1.25  # times llama.cpp's own distance to transformers
REAL_LOGPROB = 0.1  # against llama.cpp, mean over the ten best
# Where llama.cpp's own f16 and f32 caches differ by more (0.12 on gemma-3-270m), this multiple of their difference: two
# roundings of one model are that far apart, and each about as far from the exact model.
REAL_LOGPROB_PEER = 1.25
REAL_LOGPROBS_FP32 = 2e-3  # fp32 mode against transformers, largest difference
REAL_TOP1_MARGIN = 0.5  # above it, the best token must agree
REAL_GREEDY_MARGIN = 1e-2  # fp32 mode against transformers

# What the NLL of natural text may be above that with an f16 cache, in nats, mean.
KV_NLL = {"q8_0": 0.01, "tq4": 0.1}

# d loss / d embeddings of two fp32 implementations, relative to the gradient's spread.
GRADIENT = 1e-4
# A logit's growth along its gradient, by differences over steps of a thousandth of an embedding: curvature and f32.
FINITE_DIFFERENCE = 0.01
# The cosine between gradients of the native and the exact arithmetic is above this.
NATIVE_GRADIENT = 0.99

# Half the distance from 1 to the next f32. A sum in f32 is off by at most this, times the roundings on the way of a
# product through the sum, times the sum of the products' magnitudes (Higham, Accuracy and Stability, 3.1).
F32_ROUNDOFF = 2.0**-24
# One rounding of the result to the activation's type, relative.
OUTPUT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

# Products of one matrix against ggml's own, which folds the same rounded activations in another order; relative to the
# largest result.
GGML_PRODUCT = 1e-6

# Rotary frequencies: one pow and one division in f32.
INV_FREQ = 3e-7

# exp, tanh and what is built of them, against float64: two units in the last place of f32 and the rounding of a few
# products. Relative.
ACTIVATION = 5e-7
# ... and where tanh-GELU falls to zero, exp magnifies the rounding of its argument. Relative to |x * up|.
ACTIVATION_TAIL = 5e-8
# Attention in f32 against float64: sums over up to a thousand keys. Absolute; q, k and v are standard normal.
ATTENTION = 3e-6
# ... and its gradients, which sum over rows too. Relative to the gradient's largest magnitude.
ATTENTION_GRADIENT = 5e-6
# ... and in Triton, where an f32 factor of f16 numbers has 22 bits.
TRITON_ATTENTION = 6e-6
# Cosine and sine of an f32 angle, rounded to f32 once and scaled.
ROPE_TABLE = 1.3e-7
# The gated delta rule in f32 against float64, over some hundred rows. Absolute, for values of size 1; a state of size 1
# that hardly fades collects roundings of every row.
DELTA_RULE = 3e-6
# ... and its gradients, which go through as many rows. Relative to the gradient's largest magnitude.
DELTA_RULE_GRADIENT = 1e-5
# The decay and the correction of a gated delta rule: exp and log(1 + x), a few units in the last place. Relative.
DELTA_GATES = 1e-6

# Products of a few rows in Triton: the CPU's rounded activations and exact integers, f32 sums in another order; and of
# f32 activations. Relative to the sum of magnitudes.
TRITON_PRODUCT = 1e-6
# ... and of many rows, whose weights and activations are rounded to f16 or bf16 first: against f64 products of the
# rounded numbers, on tensor cores that keep fewer bits of a sum than f32 has. Relative to the sum of magnitudes.
TRITON_HALF_PRODUCT = 2e-6
# Norms and rotations in f32: a few roundings, and a reciprocal square root of two units in the last place.
TRITON_F32 = 1e-6

# Whole models on a GPU in fp32 mode, whose sums have other orders than both references': relative to the spread.
CUDA_LOGITS = 2e-4
# ... and in native mode where many rows multiply numbers of 8 bits (bf16), against the dequantized weights. Mean
# |log-probability difference|.
CUDA_LOGPROB = 0.025
# ... of tiny models, whose experts are then chosen otherwise now and then; and of f16, which has three bits more.
CUDA_HALF = {"bf16": 0.08, "f16": 0.008}
# ... and of a quantized cache against the same on the CPU: now and then a code goes to its neighbour.
CUDA_CODES = 3e-3
# ... and of captured steps, whose norms add up in another order, against the modules: an activation may be rounded the
# other way.
CUDA_FUSED = 0.05
# ... and of published models against transformers on dequantized weights: of the NLL, relative, and of the distance of
# single tokens' from theirs, times llama.cpp's own.
CUDA_REAL_NLL = 0.005
CUDA_REAL_NLL_RMS = 1.5
