"""GGUF files: `reader` (mmap, bounds-checked), `metadata` (typed reads), `source` (what model constructors ask for
tensors), `random_source` (weights out of nothing, for tests and speed measurements), `writer`; and `llama2c`, which
reads checkpoints of another kind as such files. Only the sources import torch."""
