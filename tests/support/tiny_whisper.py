"""Whispers of a few thousand random weights, with special and timestamp tokens where Whisper has them."""

from typing import Any

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

FRAMES = 100  # of a window, 1 s
TEXT = 60  # tokens that are words
EOT, SOT = 60, 61
LANGUAGES = {"<|en|>": 62, "<|de|>": 63, "<|fr|>": 64}
TASKS = {"translate": 65, "transcribe": 66}
PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = 68, 69, 70
TIMESTAMPS = 71  # 0.00, 0.02, ... 1.00
VOCABULARY = TIMESTAMPS + 51


def whisper(mels: int = 80, seed: int = 0, **sizes: Any) -> WhisperForConditionalGeneration:
    """A multilingual one, whose texts are sharp, repeat themselves now and then, and end at different lengths."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        **{
            "vocab_size": VOCABULARY,
            "num_mel_bins": mels,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 48,
            "max_source_positions": FRAMES // 2,
            "max_target_positions": 64,
            "bos_token_id": EOT,
            "eos_token_id": EOT,
            "pad_token_id": EOT,
            "decoder_start_token_id": SOT,
            "init_std": 0.4,
            **sizes,
        }
    )
    model = WhisperForConditionalGeneration(config).eval()
    own = dict[str, Any](
        is_multilingual=True,
        lang_to_id=LANGUAGES,
        task_to_id=TASKS,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        max_initial_timestamp_index=20,
        alignment_heads=[[0, 1], [1, 0]],
        begin_suppress_tokens=[3, EOT],
        suppress_tokens=[1, 2, *range(SOT, NO_TIMESTAMPS)],
        max_length=48,
    )
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    return model


def sound(batch: int, windows: float = 1.0, mels: int = 80, seed: int = 0) -> dict[str, Tensor]:
    """Features (B, mels, T) and their mask (B, T); each row is a little shorter than the one before."""
    generator = torch.Generator().manual_seed(seed)
    length = int(windows * FRAMES)
    features = torch.randn(batch, mels, length, generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, length - 7 * row :] = 0 if row else 1
    return {"input_features": features * mask[:, None], "attention_mask": mask}
