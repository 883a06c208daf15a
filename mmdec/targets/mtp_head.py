"""Loads a model's native head for multi-token prediction, by a class of transformers that has no public name."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from mmdec.errors import InputError


def load_mtp_head(model: PreTrainedModel) -> Any:
    """Load the head, transformers' `MtpModel` with one layer, from the checkpoint that the model was loaded from.

    Raises:
        InputError: If transformers knows no head of this model, if the model has several, or if the head's weights are
            not in the checkpoint.
    """
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_mtp_layers", None)
    rule = "`drafter` must be another one than 'mtp' for this model"
    if not count:
        raise InputError(
            f"{rule}: {type(model).__name__} names no native heads that transformers knows (`num_mtp_layers`). "
            "DeepSeek-V3 and GLM-4-MoE do."
        )
    layers = set(getattr(config, "mtp_layer_types", None) or ["full_attention"])
    if count != 1 or layers != {"full_attention"}:
        raise InputError(
            f"{rule}: its native heads are {count}, of {', '.join(sorted(layers))}. Only a single head with full "
            "attention is supported."
        )
    try:
        from transformers.modeling_layers import MtpModel

        head = cast(Any, MtpModel).from_pretrained(model, device_map={"": model.device})
    except (ImportError, OSError, RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"{rule}: its native head could not be loaded ({type(error).__name__}: {error!s:.300}). Load the model "
            "from a folder or Hugging Face id that holds the head, with transformers 5.23 or newer."
        ) from error
    if head.rotary_emb is None or head.has_per_layer_rope or not isinstance(head.shared_head, nn.Linear):
        raise InputError(
            f'{rule}: its head has no rotary positions of one kind, or no linear LM head. Use "lookup" or "recycling".'
        )
    return head.to(model.dtype)
