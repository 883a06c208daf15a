"""Tiny language models for tests: Llama, Qwen2 or GPT-2 with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # large, for repetitive texts and clear argmaxes
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
}


def language_model(kind: str = "llama", seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """Build a model. sizes: fields of the family's configuration that differ from `SIZES`."""
    torch.manual_seed(seed)
    config, network = KINDS[kind]
    return network(config(**{**SIZES, **sizes})).eval()


def prompts(batch: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw prompts of several lengths, padded on the left. They are repetitive, so that prompt lookup finds drafts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(batch, 14, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(batch):
        size = 14 if row == 0 else int(torch.randint(3, 15, (), generator=generator))
        part = torch.randint(3, VOCABULARY, (5,), generator=generator).repeat(3)[:size]
        ids[row, 14 - size :] = part
        mask[row, 14 - size :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def llama(seed: int = 0, hidden: int = 16) -> Any:
    return language_model("llama", seed, hidden_size=hidden)
