"""GGUF files: `reader` (mmap, bounds-checked), `metadata` (typed reads), `source` (what model constructors ask for
tensors), `random_source` (weights out of nothing, for tests and speed measurements), `writer`. Only the sources
import torch."""
