"""A hub cache in which the names that a page loads stand for a tiny model with random weights that reads bytes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from tests.support.tiny_text import language_model

REVISION = "0" * 40
MODELS = Path(__file__).parents[2] / "models"
SHIPPED = {"openai/whisper-small": "whisper-phrasebook", "llava-hf/llava-1.5-7b-hf": "vlm-scenes"}  # stand for these
END = "<|endoftext|>"


def write_cache(folder: Path, code: str) -> Path:
    """What HF_HUB_CACHE is set to, without network. code: of the blocks, whose hub ids are served."""
    for name, shipped in SHIPPED.items():
        if f'"{name}"' in code:
            repository = _repository(folder, name)
            shutil.copytree(MODELS / shipped, repository / "snapshots" / REVISION)
    vocabulary = {letter: number for number, letter in enumerate([END, *sorted(ByteLevel.alphabet())])}
    model = language_model("qwen2", vocab_size=len(vocabulary), bos_token_id=None, eos_token_id=0)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    for name in sorted(set(re.findall(r'from_pretrained\("([\w-]+/[\w.-]+)"', code))):
        repository = _repository(folder, name)
        model.save_pretrained(repository / "snapshots" / REVISION)
        tokenizer.save_pretrained(repository / "snapshots" / REVISION)
    return folder


def _repository(folder: Path, name: str) -> Path:
    """A model's folder in the cache, which knows one revision."""
    repository = folder / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
    return repository
