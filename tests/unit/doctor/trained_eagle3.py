"""A small Llama that is trained on an artificial language, and EAGLE-3 networks that are trained on its texts."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmdec.drafters.eagle.eagle3 import Eagle3, Eagle3Config
from mmdec.pretrained.language_model import LoadedLanguageModel

VOCABULARY, BOS = 52, 1
LETTERS = [3 + 3 * number // 2 for number in range(19)]  # tokens 3 ... 30, with gaps; the first one ends a word
BOUNDARIES = (2, 3, 5)  # numbers of the target's layers after which its states are the drafter's features
HEADS, SIZE, LENGTH, PROMPT = 4, 48, 72, 16
THETA = 500.0  # of the drafter's rotations: neither the usual base nor the target's


def language(rows: int, length: int, seed: int) -> Tensor:
    """Draw texts (rows, length) of words. The two words before determine a word, or one time in ten it is random."""
    fixed, draw = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    words = []
    for _ in range(16):
        size = int(torch.randint(2, 5, (), generator=fixed))
        words.append([LETTERS[1 + int(torch.randint(18, (), generator=fixed))] for _ in range(size)] + LETTERS[:1])
    follows = torch.randint(len(words), (len(words), len(words)), generator=fixed).tolist()
    texts = []
    for _ in range(rows):
        before, word = torch.randint(len(words), (2,), generator=draw).tolist()
        text = [BOS]
        while len(text) < length:
            text += words[word]
            surprise = float(torch.rand((), generator=draw)) < 0.1
            following = int(torch.randint(len(words), (), generator=draw)) if surprise else follows[before][word]
            before, word = word, following
        texts.append(text[:length])
    return torch.tensor(texts)


@cache
def target(steps: int = 300) -> LlamaForCausalLM:
    """Train a Llama of six layers on the language."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 2000.0},
        bos_token_id=BOS,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, 2 * (1 - step / steps))
        batch = language(16, 48, step)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@cache
def own_texts() -> tuple[Tensor, Tensor]:
    """Return greedy texts (256, LENGTH) of the target, and its states (4, 256, LENGTH, SIZE) after the layers in
    `BOUNDARIES` and after the final norm."""
    prompts = language(256, PROMPT, 999)
    network: Any = target()
    texts = network.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=LENGTH - PROMPT,
        min_length=LENGTH,
    )
    states = network(texts, output_hidden_states=True).hidden_states
    return texts, torch.stack([states[boundary] for boundary in (*BOUNDARIES, -1)])


@cache
def trained(seed: int = 0, steps: int = 150, **flags: Any) -> Eagle3:
    """Train an EAGLE-3 that drafts for the target on its first two tokens. flags: fields of its configuration."""
    texts, features = own_texts()
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": SIZE,
        "vocab_size": VOCABULARY,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": SIZE // HEADS,
        "rope_theta": THETA,
        "layers": tuple(boundary - 1 for boundary in BOUNDARIES),
        "draft_vocab_size": len(LETTERS),
    }
    network = Eagle3(Eagle3Config(**{**sizes, **flags}))
    network.get_buffer("d2t").copy_(torch.tensor(LETTERS) - torch.arange(len(LETTERS)))
    network.get_buffer("t2d").copy_(torch.isin(torch.arange(VOCABULARY), torch.tensor(LETTERS)))
    ids = torch.zeros(VOCABULARY, dtype=torch.long)
    ids[torch.tensor(LETTERS)] = torch.arange(len(LETTERS))
    optimizer = torch.optim.AdamW(network.parameters(), 5e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, 2 * (1 - step / steps))
        rows = torch.randint(len(texts), (16,))
        loss = _loss(network, texts[rows], features[:3, rows], ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def _loss(network: Eagle3, texts: Tensor, features: Tensor, ids: Tensor) -> Tensor:
    """Compute the cross-entropy of the first and of the second drafted token, at the tokens that the target wrote."""
    embeds: Tensor = target().get_input_embeddings()(texts)
    length = texts.shape[1] - 2  # columns that have two tokens after their own
    states = network.fuse(embeds[:, 1:-1], torch.cat(list(features), -1)[:, :-2])
    positions = torch.arange(length).expand(len(texts), -1)
    hidden, past = network(states, positions)
    own = slice(PROMPT - 1, None)  # columns whose root the target wrote
    total = _error(network, hidden[:, own], ids[texts[:, 2:]][:, own])
    states = network.fuse_drafted(embeds[:, 2:-1], hidden[:, :-1])
    seen = torch.ones(length - 1, length, dtype=torch.bool).tril()
    seen = torch.cat([seen, torch.eye(length - 1, dtype=torch.bool)], 1)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf).expand(len(texts), 1, -1, -1)
    hidden, _ = network(states, positions[:, 1:], past, mask)
    return total + _error(network, hidden[:, own], ids[texts[:, 3:]][:, own])


def _error(network: Eagle3, hidden: Tensor, expected: Tensor) -> Tensor:
    return cross_entropy(network.logits(hidden, None).flatten(0, 1), expected.flatten())  # type: ignore[arg-type]


def published_eagle3(network: Eagle3, folder: Path, **changes: Any) -> Path:
    """Write a network in SpecForge's flat layout, with explicit layers. changes: fields of config.json to set."""
    config = network.config
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        **changes,
    }
    folder.mkdir(parents=True)
    state = {name.replace("layers.0.", "midlayer."): value.contiguous() for name, value in network.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


@cache
def loaded() -> LoadedLanguageModel:
    """Return the target with a tokenizer whose words are the tokens' numbers."""
    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # special tokens would split longer numbers
    return LoadedLanguageModel(target(), own, Path())


def prompt_texts(count: int, seed: int = 7) -> list[str]:
    """Draw prompts for `loaded`, as text."""
    return [" ".join(map(str, row)) for row in language(count, PROMPT, seed).tolist()]
