"""A hub cache in which the names that a page loads stand for a tiny model with random weights and the page's words."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

REVISION = "0" * 40


def write_cache(folder: Path, text: str) -> Path:
    """What HF_HUB_CACHE is set to, without network. text: the code; its hub ids are served, its words are known."""
    words = sorted(set(re.findall(r"[a-zA-Z]+", text)))
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    spelled = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    spelled.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    specials = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(vocabulary), num_key_value_heads=1, pad_token_id=0, eos_token_id=2, **sizes)
    model = Qwen2ForCausalLM(config)
    for name in sorted(set(re.findall(r'from_pretrained\("([\w-]+/[\w.-]+)"', text))):
        repository = folder / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
        model.save_pretrained(repository / "snapshots" / REVISION)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelled, **specials)
        tokenizer.save_pretrained(repository / "snapshots" / REVISION)
    return folder
