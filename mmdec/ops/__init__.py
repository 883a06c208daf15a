"""Operators: dynamic programs and kernels on tensors. They know nothing of models."""
