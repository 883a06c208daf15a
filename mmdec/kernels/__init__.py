"""Operators on tensors: each a reference in torch, a Triton kernel, and a fast form for CPUs where it pays."""
