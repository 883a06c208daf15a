"""Whether something hangs on a module that a pass of our own would leave out."""

from __future__ import annotations

from torch import nn

RECORDERS = "transformers.utils.output_capturing"  # stay on a model once hidden states were asked for, and do nothing


def hooked(module: nn.Module) -> bool:
    """Hooks, or another `forward` put in its place. transformers' own recorders of outputs do not count."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(getattr(hook, "__module__", "") != RECORDERS for hook in hooks)
