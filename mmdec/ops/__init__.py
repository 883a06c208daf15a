"""Tensors in, tensors out: dynamic programs and kernels. An operator knows nothing of models."""
