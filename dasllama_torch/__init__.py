"""A GGUF file as an ordinary PyTorch module graph that stays packed.

    import dasllama_torch as dl
    model = dl.load_model("model.gguf")
    session = dl.create_session(model)
    for token, piece in session.generate(model.encode("Once"), dl.SamplingParams(temp=0.8, top_p=0.95), max_tokens=64):
        print(piece, end="", flush=True)

Importing the package imports nothing heavy: names are looked up when they are first used.
"""

from importlib import import_module

_WHERE = {
    "load_model": "api",
    "AutoModelForCausalLM": "auto",
    "AutoTokenizer": "auto",
    "hf_tokenizer": "hf.tokenizer",
    "build_model": "api",
    "caps": "api",
    "Caps": "arch.caps",
    "create_session": "api",
    "create_kv_pool": "api",
    "create_chat": "api",
    "create_chat_renderer": "api",
    "Chat": "chat.chat",
    "ChatPiece": "chat.reply",
    "ChatReply": "chat.reply",
    "fork": "api",
    "load_session": "api",
    "embed": "api",
    "truncate": "api",
    "release_kv_pages": "api",
    "eval_batch": "api",
    "eval_embd": "api",
    "eval_embd_span": "api",
    "eval_embd_span_mrope": "api",
    "generate_embd": "api",
    "Embeddings": "engine.embeddings",
    "set_gpu_tier_want": "engine.gpu_tier",
    "gpu_tier_status": "engine.gpu_tier",
    "gpu_weight_budget": "engine.gpu_tier",
    "gpu_drop_model": "engine.gpu_tier",
    "gpu_rearm_model": "engine.gpu_tier",
    "GpuTierWant": "engine.gpu_tier",
    "GpuTierStatus": "engine.gpu_tier",
    "create_prefix_cache": "api",
    "prefix_attach": "api",
    "prefix_insert": "api",
    "prefix_release": "api",
    "prefix_held_groups": "api",
    "prefix_chain_list": "api",
    "PrefixCache": "engine.prefix_cache",
    "compare": "inspect.compare",
    "Comparison": "inspect.compare",
    "evaluate": "inspect.evaluate",
    "Evaluation": "inspect.evaluate",
    "to_hf": "export.weights",
    "save_safetensors": "export.folder",
    "requantize": "export.requantize",
    "packed_transformers": "export.packed",
    "pack": "export.packed",
    "PrefixChain": "cache.prefix",
    "Session": "engine.session",
    "KVPool": "cache.pool",
    "SamplingParams": "sampling",
    "TokenLogprob": "sampling",
    "Constraint": "constraints",
    "Sample": "engine.generation",
    "profile_prefill": "bench",
    "profile_decode": "bench",
    "profile_table": "bench",
    "Ceilings": "bench",
    "DasllamaError": "errors",
    "GGUFError": "errors",
    "UnsupportedModel": "errors",
    "TokenizerError": "errors",
    "OutOfPages": "errors",
    "OutOfMemory": "errors",
    "ContextFull": "errors",
    "CannotRewind": "errors",
    "SessionFileError": "errors",
    "KernelError": "errors",
    "FolderError": "errors",
    "TemplateError": "errors",
    "ConstraintError": "errors",
    "DownloadError": "errors",
    "UnknownName": "errors",
    "run_with_cache": "inspect.activations",
    "patch": "inspect.patching",
    "steer": "inspect.patching",
    "logit_lens": "inspect.lens",
    "attention_pattern": "inspect.attention",
    "router_choices": "inspect.experts",
    "recurrent_states": "inspect.states",
    "quantization_error": "inspect.quantization",
    "logit_attribution": "inspect.attribution",
    "embedding_gradients": "inspect.gradients",
    "saliency": "inspect.gradients",
}

__all__ = list(_WHERE)


def __getattr__(name: str):
    if name == "__version__":
        from importlib.metadata import version

        return version("dasllama-torch")
    if name == "inspect":
        return import_module("dasllama_torch.inspect")
    if name in _WHERE:
        return getattr(import_module(f"dasllama_torch.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *__all__, "inspect"]
