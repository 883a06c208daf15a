"""A tiny Whisper on disk with its processor, whose window is a second, and heads beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor

from mmdec.hub.medusa import save_heads
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.training.whisper.tokenizer import build_tokenizer, generation_config

TEXTS = ["Hello there, how are you today?", "The train leaves at seven in the evening.", "Where is the station?"] * 3
STEPS = 50  # of 0.02 s in a window


def processor() -> WhisperProcessor:
    return WhisperProcessor(WhisperFeatureExtractor(feature_size=80, chunk_length=1), build_tokenizer(TEXTS, 320))


def network(tokenizer: Any, seed: int = 3, **sizes: Any) -> WhisperForConditionalGeneration:
    """Random weights whose texts end, and repeat themselves now and then."""
    number = tokenizer.convert_tokens_to_ids
    end, start, first = number("<|endoftext|>"), number("<|startoftranscript|>"), number("<|notimestamps|>") + 1
    torch.manual_seed(seed)
    config = WhisperConfig(
        **{
            "vocab_size": len(tokenizer),
            "num_mel_bins": 80,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 48,
            "max_source_positions": STEPS,
            "max_target_positions": 64,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "decoder_start_token_id": start,
            "init_std": 0.4,
            **sizes,
        }
    )
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config = generation_config(tokenizer, 12)
    own = dict[str, Any](
        lang_to_id={"<|en|>": number("<|en|>"), "<|de|>": number("<|startoflm|>")},
        max_initial_timestamp_index=20,
        alignment_heads=[[0, 1], [1, 0]],
        suppress_tokens=[*range(end + 1, first - 1), *range(first + STEPS + 1, len(tokenizer))],
    )
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    return model


def heads(model: WhisperForConditionalGeneration, seed: int = 0) -> MedusaHeads:
    torch.manual_seed(seed)
    made = MedusaHeads(MedusaConfig(hidden_size=32, vocab_size=model.config.vocab_size, heads=3))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return made


def write(directory: Path, with_heads: bool = True, **sizes: Any) -> Path:
    """What `load_whisper` reads."""
    whole = processor()
    model = network(whole.tokenizer, **sizes)  # type: ignore[attr-defined]
    model.half().save_pretrained(directory)
    whole.save_pretrained(directory)
    if with_heads:
        save_heads(directory / "medusa", heads(model))
    return directory
