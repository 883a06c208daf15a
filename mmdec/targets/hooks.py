"""Detects hooks and patches on a module, which a fast path would skip."""

from __future__ import annotations

from torch import nn

# transformers' hooks from this module remain after hidden states were requested once; they do nothing
RECORDERS = "transformers.utils.output_capturing"


def hooked(module: nn.Module) -> bool:
    """Whether the module has hooks or a replaced `forward`. transformers' own output recorders do not count."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(getattr(hook, "__module__", "") != RECORDERS for hook in hooks)
