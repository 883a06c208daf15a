"""A hub cache in which the names that a page loads stand for a tiny model with random weights that reads bytes."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

REVISION = "0" * 40
END = "<|endoftext|>"


def write_cache(folder: Path, code: str) -> Path:
    """What HF_HUB_CACHE is set to, without network. code: of the blocks, whose hub ids are served."""
    vocabulary = {letter: number for number, letter in enumerate([END, *sorted(ByteLevel.alphabet())])}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(vocabulary), num_key_value_heads=1, pad_token_id=0, eos_token_id=0, **sizes)
    model = Qwen2ForCausalLM(config)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    for name in sorted(set(re.findall(r'from_pretrained\("([\w-]+/[\w.-]+)"', code))):
        repository = folder / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
        model.save_pretrained(repository / "snapshots" / REVISION)
        tokenizer.save_pretrained(repository / "snapshots" / REVISION)
    return folder
