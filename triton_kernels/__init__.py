"""Kernels for CUDA and ROCm in Triton: one file per op. Importing this package registers them on the CUDA key."""

from dasllama_torch.triton_kernels import (  # noqa: F401
    attention,
    by_torch,
    causal_conv1d,
    delta_gates,
    dequantize,
    embedding,
    expert_linear,
    fusion,
    gated_act,
    gated_delta_rule,
    kv_write,
    moe_combine,
    moe_router,
    paged_attention,
    quant_linear,
    quantize_activation,
    rms_norm,
    rope,
    rope_tables,
    softcap,
)
