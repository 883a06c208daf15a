"""Operators on tensors: dynamic programs over graphs, attention to draft trees, moves in a key-value cache, fast linear
layers. On a GPU some of them are Triton kernels. No operator depends on a model's class."""
