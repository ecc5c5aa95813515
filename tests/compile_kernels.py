"""Compile the Triton kernels ahead of time, without a GPU, and print what was compiled: a program of its own, because
Triton must not be interpreting when the kernels are imported.

    python tests/compile_kernels.py [--targets sm_90,gfx942] [--types Q4_K,IQ3_S] [--variants] [--attention]
"""

import argparse
import contextlib
import functools

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.uint8: "u8",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip
# Bytes of shared memory of a program, at most.
_SHARED = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@contextlib.contextmanager
def compiled(targets, variants: bool = True):
    """Within it a launch compiles its kernel for each target, specialized as for the launch, and runs nothing.

    variants: each way that a kernel is specialized, not the first one alone.

    Yields a list of (kernel's name, target's name), one entry for each compilation.
    """
    done, seen = [], set()

    def run(self, *args, grid=None, warmup=False, **kwargs):
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        for target in targets:
            if not variants and (self.__name__, target) in done:
                continue
            signature, constants, attrs = {}, {}, {}
            for at, parameter in enumerate(self.params):
                value = bound[parameter.name]
                if parameter.name == "PTX":
                    value = TARGETS[target].backend == "cuda"
                elif parameter.name == "EARLY":
                    value = target == "sm_90"
                if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                    signature[parameter.name], constants[(at,)] = "constexpr", value
                    continue
                if isinstance(value, torch.Tensor):
                    signature[parameter.name] = "*" + _TYPES[value.dtype]
                    whole = value.data_ptr() % 16 == 0
                elif isinstance(value, float):
                    signature[parameter.name], whole = "fp32", False
                else:
                    signature[parameter.name], whole = ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0
                if whole:
                    attrs[(at,)] = [["tt.divisibility", 16]]
            key = (self.__name__, target, str(signature), str(constants), str(attrs), str(options))
            if key not in seen:
                seen.add(key)
                source = ASTSource(self, signature, constants, attrs)
                size = triton.compile(source, target=TARGETS[target], options=options).metadata.shared
                if size > _SHARED[target]:
                    raise RuntimeError(f"{self.__name__} takes {size} bytes of the shared memory of {target}")
                done.append((self.__name__, target))

    before, JITFunction.run = JITFunction.run, run
    try:
        yield done
    finally:
        JITFunction.run = before


def launches(types: list[str]) -> list:
    """Calls that launch every kernel, and those of packed weights for each of the types."""
    from dasllama_torch.ops import ggml_types
    from dasllama_torch.triton_kernels import (
        attend_row,
        causal_conv1d,
        combine_round,
        delta_gates,
        dequantize,
        embedding,
        few_rows,
        few_rows_experts,
        few_rows_mma,
        fused_round,
        gated_act,
        gated_delta_rule,
        grouped_rows,
        kv_write,
        moe_combine,
        moe_router,
        paged_attention,
        quantize_activation,
        rms_norm,
        rope,
        rope_tables,
        rope_write,
        sample_token,
        softcap,
    )

    x, weight, tables = torch.zeros(3, 5, 64), torch.zeros(64), torch.zeros(3, 16)
    positions, axes, slots = torch.zeros(3, 3, dtype=torch.int64), torch.zeros(16, dtype=torch.int32), torch.arange(3)
    cache = {dtype: torch.zeros(64, 5, 16, 64, dtype=dtype) for dtype in (torch.float32, torch.float16)}
    codes = [torch.zeros(64, 5, 16, 2 * size, dtype=torch.uint8) for size in (34, 18)]  # q8_0, tq4
    state, square, prompt = torch.zeros(2, 5, 64, 64), torch.zeros(256, 256), torch.zeros(80, 5, 64)
    rows = [torch.zeros(3, dtype=torch.int32)] * 3

    def attend(T, dtype, codec, sinks, D=64, fresh=None):
        pages = torch.zeros(1, 64, dtype=torch.int32)
        q, own = torch.zeros(T, 10, D), torch.zeros(64, 5, 64, D, dtype=dtype)
        args = (q, own, own, pages, *(r.new_zeros(T) for r in rows), 0.1, 7, 3.0, sinks)
        _, shared = paged_attention.attend(*args, codec, codec, D, fresh)
        if shared is not None:
            shared.combine()

    calls = [
        lambda: rms_norm.rms_norm(x, weight, 1e-5),
        lambda: rms_norm.rms_norm_backward(x, x, None, 1e-5),
        *(functools.partial(gated_act.gated_act, x, x, act) for act in range(4)),
        *(functools.partial(gated_act.gated_act_backward, x, x, x, act) for act in range(4)),
        lambda: sample_token.sample_token(x.view(-1), slots, 1.1, 0.1, 0.2, 0.9, 5, 0.9, 0.01, 0.4),
        lambda: sample_token.sample_token(x.view(-1), slots, 1.1, 0.1, 0.2, 0.0, 0, 1.0, 0.0, 0.0),
        lambda: sample_token.sample_tokens(x.view(3, -1), slots[:, None], 1.1, 0.1, 0.2, 0.9, 5, 0.9, 0.01, [0.4] * 3),
        lambda: softcap.softcap(x, 3.0),
        lambda: softcap.softcap_backward(x, x, 3.0),
        lambda: rope.rope(x, tables, tables),
        lambda: rope_tables.rope_tables(positions[0], tables[0], 1.0),
        lambda: rope_tables.rope_tables(positions, tables[0], 1.0, axes),
        lambda: rope_tables.long_rope_tables(slots, slots, tables[0], tables[0], 99, 1.0),
        lambda: kv_write.kv_write(x, x, cache[torch.float32], cache[torch.float16], slots, 0, 1),
        lambda: attend(1, torch.float16, 1, weight[:10].clone(), 128),  # few rows share the keys
        lambda: attend(1, torch.float32, 0, None),
        lambda: attend(
            1, torch.float16, 1, None, 64, attend_row.Fresh(x, x, x, x, x, tables[:1], tables[:1], slots[:1])
        ),
        lambda: attend(2000, torch.float32, 0, None),
        lambda: kv_write.kv_write(x, x, *codes, slots, 2, 3),
        lambda: paged_attention.paged_attention(
            x.repeat(1, 2, 1), *codes, torch.zeros(1, 64, dtype=torch.int32), *rows, 0.1, 0, 0.0, None, 2, 3, 64
        ),
        lambda: paged_attention.paged_attention(
            x[:1].repeat(1, 2, 1),
            *codes,
            torch.zeros(1, 64, dtype=torch.int32),
            *(r[:1] for r in rows),
            *(0.1, 0, 0.0, None, 2, 3, 64),
        ),
        *(
            functools.partial(moe_router.moe_router, x[0], weight if gate else None, 3, gate, renormalize, 1.0)
            for gate in range(2)
            for renormalize in (False, True)
        ),
        lambda: rope_write.rope_write(
            *(x, x, x, x, tables, tables, x, cache[torch.float16], cache[torch.float16], slots)
        ),
        lambda: combine_round.combine_rounded(
            paged_attention.Shared(x[:1], x[None, :1], x[None, :1, :, 0], x[None, :1, :, 0], None), ggml_types.Q8_0
        ),
        lambda: fused_round.norm_rounded(square, square, square[0], 1e-5, ggml_types.Q8_K),
        *(functools.partial(fused_round.act_rounded, square, square, square, act, ggml_types.Q8_1) for act in range(4)),
        lambda: moe_combine.moe_combine(x, x[..., 0].contiguous()),
        lambda: delta_gates.delta_gates(x[0], x[1], weight, weight),
        lambda: causal_conv1d.causal_conv1d_update(x[:, 0], x.new_zeros(64, 4), x.new_zeros(3, 3, 64), rows[0]),
        lambda: gated_delta_rule.gated_delta_update(x, x, x, x[..., 0], x[..., 1], state, rows[0]),
        lambda: gated_delta_rule.gated_delta_update(
            *(prompt, prompt, prompt, prompt[..., 0], prompt[..., 1], state, torch.zeros(80, dtype=torch.int32))
        ),
        lambda: grouped_rows.grouped_rows(
            x[0], weight.view(torch.uint8).repeat(4, 3, 1), ggml_types.F32, None, slots.repeat(5), torch.float32
        ),
    ]
    for qtype in map(ggml_types.by_name, types):
        w = torch.zeros(64, qtype.row_bytes(1024), dtype=torch.uint8)
        calls += [
            *(functools.partial(few_rows.few_rows_native, torch.zeros(M, 1024), w, qtype.id, None) for M in (2, 16)),
            functools.partial(
                few_rows.few_rows_together,
                quantize_activation.rounded(torch.zeros(1, 1024), qtype.lattice),
                [w, w, w],
                qtype.id,
                [x, x, x],
            ),  # fmt: skip
            functools.partial(
                few_rows.few_rows_together,
                quantize_activation.rounded(torch.zeros(1, 1024), qtype.lattice),
                [w],
                qtype.id,
                [x],
                None,
                x,
                x,
            ),  # fmt: skip
            functools.partial(few_rows.few_rows_float, torch.zeros(1, 1024), w, qtype.id, weight),
            functools.partial(few_rows.few_rows_native, torch.zeros(2, 1024), w[None], qtype.id, None, slots[:2]),
            functools.partial(
                grouped_rows.grouped_rows,
                *(torch.zeros(5, 1024, dtype=torch.bfloat16), w[None], qtype.id, weight[None], slots.new_zeros(200)),
                torch.float32,
            ),
            functools.partial(dequantize.unpack, w, qtype.id, torch.bfloat16),
            functools.partial(embedding.embedding, slots, w, qtype.id, 1.0),
        ]
        if few_rows_mma.serves(qtype.id):
            args = torch.zeros(3, 1024), w[None], qtype.id, weight[None], slots
            calls.append(functools.partial(few_rows_experts.few_rows_experts, *args))
            large = torch.zeros(2048, qtype.row_bytes(4096), dtype=torch.uint8)  # x is read ahead
            calls.append(functools.partial(few_rows.few_rows_native, torch.zeros(16, 4096), large, qtype.id, None))
    pair = [torch.zeros(64, ggml_types.by_name(name).row_bytes(1024), dtype=torch.uint8) for name in ("Q4_K", "Q6_K")]
    calls.append(
        lambda: few_rows.few_rows_together(
            quantize_activation.rounded(torch.zeros(1, 1024), ggml_types.Q8_K),
            *(pair, ggml_types.Q4_K, [x, x], None, None, None, ggml_types.Q6_K),
        )
    )
    return [*calls, lambda: embedding.embedding(slots, torch.zeros(9, 128, dtype=torch.uint8), ggml_types.F16, 1.0)]


def attentions() -> list:
    """Attention of what takes much shared memory: single rows and a prompt, caches, heads."""
    from dasllama_torch.ops.kv_codecs import KV_CODECS
    from dasllama_torch.triton_kernels import paged_attention

    def attend(T: int, name: str, D: int) -> None:
        codec, row = KV_CODECS[name], torch.zeros(T, dtype=torch.int32)
        cache = torch.zeros(64, 2, 64, codec.row(D), dtype=codec.dtype)
        args = torch.zeros(T, 8, D), cache, cache, torch.zeros(1, 64, dtype=torch.int32), row, row, row
        paged_attention.attend(*args, 0.1, 0, 0.0, None, codec.id, codec.id, D)

    cases = (1, "f16", 512), (1, "f32", 128), (1, "f32", 512), (1, "q8_0", 256), (200, "f16", 256), (200, "q8_0", 256)
    return [functools.partial(attend, *case) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--types", default="Q4_K,Q6_K,IQ3_S,MXFP4")
    parser.add_argument("--variants", action="store_true", help="all that the launches have, not one of each kernel")
    parser.add_argument("--attention", action="store_true", help="attention of wide heads alone, with all variants")
    options = parser.parse_args()
    torch.set_num_threads(1)
    targets = options.targets.split(",")
    from dasllama_torch.triton_kernels import paged_attention

    paged_attention.PTX = all(TARGETS[target].backend == "cuda" for target in targets)
    paged_attention._is_roomy = lambda device: min(_SHARED[target] for target in targets) >= paged_attention.ROOMY
    with compiled(targets, options.variants or options.attention) as done:
        for launch in attentions() if options.attention else launches(options.types.split(",")):
            launch()
    for kernel, target in done:
        print(kernel, target)


if __name__ == "__main__":
    main()
