"""Operators on tensors: dynamic programs over graphs, attention to draft trees, moves in a key-value cache, fast linear
layers. On a GPU some are Triton kernels. None of them knows a model."""
