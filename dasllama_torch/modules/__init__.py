"""Small parts that a model file composes. Each asks a TensorSource for its tensors by GGUF name and shape."""
