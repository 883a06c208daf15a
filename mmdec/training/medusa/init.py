"""Initial Medusa heads, saved or new, and the weight of each head's loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import WhisperForConditionalGeneration

from mmdec.hub.medusa import load_heads
from mmdec.nn.medusa import Kind, MedusaConfig, MedusaHeads
from mmdec.types import InputError


def head_weights(weights: str | Sequence[float], heads: int) -> list[float]:
    """A number for each head."""
    if isinstance(weights, str):
        if weights not in ("medusa", "mean"):
            raise InputError(f"`weights` must be medusa, mean or a list of numbers, but is {weights!r}. Choose one.")
        return [0.8**k if weights == "medusa" else 1.0 for k in range(1, heads + 1)]
    if len(weights) != heads or min(weights) < 0 or sum(weights) == 0:
        raise InputError(
            f"`weights` must be {heads} numbers of at least 0, not all of them 0, but is {list(weights)}. Give one for "
            "each head."
        )
    return [float(weight) for weight in weights]


def first_heads(
    model: WhisperForConditionalGeneration, base: str, kind: Kind, count: int, start: str | None
) -> MedusaHeads:
    """Heads to begin with: those in `start`, fewer or more of them if `count` says so, or new ones."""
    shape = model.config
    block = kind == "block"
    config = MedusaConfig(
        hidden_size=shape.d_model,
        vocab_size=shape.vocab_size,
        kind=kind,
        heads=count,
        attention_heads=shape.decoder_attention_heads if block else 0,
        ffn=shape.decoder_ffn_dim if block else 0,
        mels=shape.num_mel_bins,
        base=Path(base).name if Path(base).is_dir() else base,
    )
    heads = MedusaHeads(config)
    if start is None:
        if heads.block is not None:  # Whisper's names are the layer's own
            heads.block.load_state_dict(model.model.decoder.layers[-1].state_dict())
        return heads.float()
    earlier = load_heads(start, model).heads
    if earlier.config.kind != kind:
        raise InputError(f"`start` must hold {kind} heads, but '{start}' holds {earlier.config.kind} ones. Set `kind`.")
    matching = {name: value for name, value in earlier.state_dict().items() if name in heads.state_dict()}
    heads.load_state_dict(matching, strict=False)
    return heads.float()
