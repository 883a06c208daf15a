"""A small random encoder-decoder of each supported family, and inputs of several lengths for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers.utils import logging

VOCABULARY = 40
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,  # few, so that a wrong distance changes the logits
    "relative_attention_max_distance": 16,
}
MOONSHINE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
SEAMLESS: dict[str, Any] = {name: value for name, value in BART.items() if name != "d_model"} | {
    "hidden_size": 32,
    "t2u_vocab_size": VOCABULARY,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    "feature_projection_input_dim": 16,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
    "num_adapter_layers": 1,
}
SPEECH: dict[str, Any] = {name: value for name, value in BART.items() if name != "max_position_embeddings"} | {
    "max_target_positions": 96,
    "max_source_positions": 200,
    "conv_channels": 32,
    "conv_kernel_sizes": [3, 3],
    "input_feat_per_channel": 16,
}
FOR = "ForConditionalGeneration"
# class -> sizes of its configuration
CLASSES: dict[str, dict[str, Any]] = {
    f"T5{FOR}": T5,
    f"MT5{FOR}": T5,
    f"UMT5{FOR}": T5,
    f"Bart{FOR}": BART,
    f"MBart{FOR}": BART,
    f"PLBart{FOR}": BART,
    f"Mvp{FOR}": BART,
    f"Blenderbot{FOR}": BART,
    f"BlenderbotSmall{FOR}": BART,
    f"Pegasus{FOR}": {**BART, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    f"BigBirdPegasus{FOR}": {**BART, "attention_type": "original_full"},
    f"M2M100{FOR}": BART,  # NLLB
    "MarianMTModel": {**BART, "pad_token_id": VOCABULARY - 1, "decoder_start_token_id": VOCABULARY - 1},
    f"Speech2Text{FOR}": SPEECH,
    f"Moonshine{FOR}": MOONSHINE,
    "SeamlessM4TForTextToText": SEAMLESS,
    "SeamlessM4TForSpeechToText": SEAMLESS,
    "SeamlessM4Tv2ForTextToText": SEAMLESS,
    "SeamlessM4Tv2ForSpeechToText": SEAMLESS,
}
SPREAD = 0.3  # standard deviation of random weights: it gives repetitive texts and clear argmaxes


@lru_cache(40)
def encoder_decoder(name: str, attention: str = "eager", seed: int = 0, **sizes: Any) -> Any:
    """Build a model with two encoder and two decoder layers, float32, random weights. name: the class."""
    kind: Any = getattr(transformers, name)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # building a model warns about its token ids
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = kind(kind.config_class(**{"vocab_size": VOCABULARY, **CLASSES[name], **sizes})).eval()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim > 1:
                        weight.normal_(0.0, SPREAD)
    finally:
        logging.set_verbosity(verbosity)
    model.set_attn_implementation(attention)
    return model


def attentions(name: str) -> list[str]:
    """List the attention implementations that the class supports."""
    return ["sdpa", "eager"] if getattr(transformers, name)._supports_sdpa else ["eager"]


def sources(model: Any, batch: int, seed: int = 0) -> dict[str, Any]:
    """Draw an encoder's inputs, padded on the right: repetitive texts, or sound."""
    generator = torch.Generator().manual_seed(seed)
    name = model.main_input_name
    size = 15 if name == "input_ids" else 4000 if name == "input_values" else 60
    mask = torch.ones(batch, size, dtype=torch.long)
    for row in range(1, batch):
        mask[row, int(torch.randint(3 * size // 5, size + 1, (), generator=generator)) :] = 0
    if name == "input_ids":
        ids = torch.randint(4, VOCABULARY - 1, (batch, size // 3), generator=generator).repeat(1, 3)
        inputs = {name: ids.masked_fill(mask == 0, model.config.pad_token_id)}
    else:
        shape = (batch, size) if name == "input_values" else (batch, size, 16)
        inputs = {name: torch.randn(shape, generator=generator)}
    if "Seamless" in type(model).__name__:  # the language's token
        inputs["decoder_input_ids"] = torch.full((batch, 2), 3)
    return {**inputs, "attention_mask": mask}
