"""Train a tiny language model with LayerSkip's early-exit loss, and measure what its first layers draft.

The model (Llama of 6 layers, 96 channels, bytes as tokens) reads the pages of docs/. Two models begin alike: one is
trained on the last layer's loss alone, the other on the loss of each exit, too, whose weight grows with its depth;
layers are dropped at random, the deeper the more often (LayerSkip, Elhoushi et al. 2024, section 4.1). Both are then
decoded greedily without drafts and with `drafter="early_exit"`; the texts must be equal.

Command: python recipes/early_exit/train.py --steps 200
Hardware: a CPU, one thread. Minutes: 2 for both on an idle core.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mmdec
from mmdec.pretrained.early_exit import EarlyExitDrafter

PAGES = Path(__file__).parents[2] / "docs"
EXIT_LOSS = 0.3  # weight of the exits' losses together; LayerSkip: 0.1 to 1
MAX_DROPOUT = 0.2  # probability that the last layer is dropped in training
CONTEXT, BATCH = 64, 8
PROMPTS = ("The text is the model's own", "A drafter proposes", "Each round", "mmdec ")


def build(layers: int) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=layers, **shape, **ends))


class Dropped(nn.Module):
    """A decoder layer that is left out at random, and keeps its output for the exit's loss."""

    def __init__(self, layer: nn.Module, probability: float) -> None:
        super().__init__()
        self.layer, self.probability = layer, probability
        self.output: Any = None

    def forward(self, states: Tensor, **options: Any) -> Any:
        self.output = states if random.random() < self.probability else self.layer(states, **options)
        return self.output


def train(model: Any, data: Tensor, steps: int, early_exit: bool) -> None:
    """Train a model; with `early_exit` on the loss of one exit in turn, too, and with dropped layers."""
    layers, count = model.model.layers, len(model.model.layers)
    random.seed(0)
    if early_exit:
        probabilities = [MAX_DROPOUT * (2 ** (index / (count - 1)) - 1) for index in range(count)]
        model.model.layers = nn.ModuleList(map(Dropped, layers, probabilities))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    rng = torch.Generator().manual_seed(0)
    model.train()
    for step in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=rng)
        ids = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        out = model(input_ids=ids[:, :-1], use_cache=False)
        loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
        if early_exit:
            exit_layer = 1 + step % (count - 1)  # each exit in turn: LayerSkip's rotating curriculum
            states = model.model.norm(model.model.layers[exit_layer - 1].output)
            own = nn.functional.cross_entropy(model.lm_head(states).flatten(0, 1), ids[:, 1:].flatten())
            loss = loss + EXIT_LOSS * 2 * exit_layer / count * own
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"  step {step}: loss {loss.item():.2f}", flush=True)
    model.model.layers = layers
    model.eval()


def measure(model: Any, tokens: int) -> None:
    """Print tokens per round and CPU seconds without drafts and with an early exit."""
    prompts = [torch.tensor([list(text.encode())]) for text in PROMPTS]
    drafter, texts = EarlyExitDrafter.from_model(model), list[list[list[int]]]()
    for choice in (None, drafter, None, drafter):
        began, rounds, found = time.process_time(), 0, list[list[int]]()
        for ids in prompts:
            result = mmdec.generate(model, ids, choice, max_new_tokens=tokens, do_sample=False)
            rounds += len(result.rounds)
            found.append(result.sequences[0].tolist())
        texts.append(found)
        seconds = time.process_time() - began
        name = "none" if choice is None else f"early exit, layers {drafter.layers}"
        print(f"  {name}: {tokens * len(prompts) / rounds:.2f} tokens per round, {seconds:.1f} s", flush=True)
    if any(text != texts[0] for text in texts):
        raise SystemExit("error: the texts differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--loss", type=int, nargs="+", default=[1, 0], help="1: early exits; 0: last layer alone.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.tensor(list("\n\n".join(page.read_text() for page in sorted(PAGES.rglob("*.md"))).encode()))
    for early_exit in options.loss:
        print("early-exit loss" if early_exit else "last layer's loss alone", flush=True)
        model = build(options.layers)
        train(model, data, options.steps, early_exit)
        measure(model, options.tokens)


if __name__ == "__main__":
    main()
