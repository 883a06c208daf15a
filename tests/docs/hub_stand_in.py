"""A hub cache in which the names that a page loads stand for a tiny model with random weights that reads bytes."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from tests.support.tiny_text import language_model

REVISION = "0" * 40
END = "<|endoftext|>"


def write_cache(folder: Path, code: str) -> Path:
    """What HF_HUB_CACHE is set to, without network. code: of the blocks, whose hub ids are served."""
    vocabulary = {letter: number for number, letter in enumerate([END, *sorted(ByteLevel.alphabet())])}
    model = language_model("qwen2", vocab_size=len(vocabulary), bos_token_id=None, eos_token_id=0)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    for name in sorted(set(re.findall(r'from_pretrained\("([\w-]+/[\w.-]+)"', code))):
        repository = folder / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
        model.save_pretrained(repository / "snapshots" / REVISION)
        tokenizer.save_pretrained(repository / "snapshots" / REVISION)
    return folder
