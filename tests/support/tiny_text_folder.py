"""Folders of tiny language models with random weights and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_llava import build_tokenizer
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm_folder import sharpen

CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


OTHER = ["Once upon a time there was a dog.", " Would you like some tea?", "Nobody knows why."]


def write(directory: Path, texts: list[str], seed: int, chat: bool = False, **sizes: Any) -> Path:
    """Write a folder in transformers' format. texts: the tokenizer is trained on them. chat: add a chat template."""
    tokenizer = build_tokenizer(texts * 3, 300)
    tokenizer.chat_template = CHAT if chat else None
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = language_model("llama", seed, vocab_size=len(tokenizer), **ends, **sizes)
    sharpen(model, seed, 1.6)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
