"""Operators: dynamic programs and kernels over tensors. They do not depend on models."""
