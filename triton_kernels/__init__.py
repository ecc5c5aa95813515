"""Kernels for CUDA and ROCm in Triton: one file per op. Importing this package registers them on the CUDA key."""

from dasllama_torch.triton_kernels import (  # noqa: F401
    dequantize,
    elementwise,
    embedding,
    gated_act,
    kv_write,
    paged_attention,
    quant_linear,
    quantize_activation,
    rms_norm,
    rope,
    rope_tables,
    softcap,
)
