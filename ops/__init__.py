"""Torch custom ops `torch.ops.dasllama.*`: one file per op (schema, reference, fake), one kernel per backend.

Importing this package imports nothing: `ggml_types` is plain data that any tool may read without torch.
"""

_REGISTRY = ("report", "reset_report", "strict", "use_reference", "compare_to_reference", "set_isa", "isas")


def __getattr__(name):
    if name in _REGISTRY:
        from dasllama_torch.ops import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
