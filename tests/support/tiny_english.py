"""A corpus of a dozen tones in LibriSpeech's layout, and a Whisper of a few thousand random weights that hears 30 s."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor

from mmdec.audio import save_audio
from mmdec.training.whisper.tokenizer import build_tokenizer, generation_config

TEXTS = ["Where is the station?", "The station is near.", "Two teas, please.", "It's five o'clock."]


def write_english(root: Path) -> Path:
    """Two chapters of tones to train on, one for development."""
    for split, chapters in (("train", 2), ("train_everyday", 1), ("dev", 1)):
        for chapter in range(chapters):
            folder = root / split / "0001" / str(chapter)
            lines = []
            for index, text in enumerate(TEXTS):
                tone = 0.3 * torch.sin(torch.arange(16000) * 2 * torch.pi * (200 + 100 * index + 30 * chapter) / 16000)
                save_audio(folder / f"0001-{chapter}-{index:04d}.flac", tone)
                lines.append(f"0001-{chapter}-{index:04d} {text}")
            (folder / f"0001-{chapter}.trans.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def write_whisper(folder: Path, seed: int = 5, mels: int = 80) -> Path:
    """Sharp enough to go on about something; what it says has no meaning."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(TEXTS, 280)
    settings = generation_config(tokenizer, 96)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer),
            num_mel_bins=mels,
            d_model=48,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=24,
            max_target_positions=96,
            pad_token_id=settings.pad_token_id,  # type: ignore[arg-type]
            bos_token_id=settings.bos_token_id,  # type: ignore[arg-type]
            eos_token_id=settings.eos_token_id,  # type: ignore[arg-type]
            decoder_start_token_id=settings.decoder_start_token_id,
            init_std=0.4,
        )
    )
    model.generation_config = settings
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=mels), tokenizer).save_pretrained(folder)
    return folder
