"""Train a language model with the consistency loss of CLLM, and measure what Jacobi decoding drafts before and after.

The model continues openings that it has sampled itself, greedily. From such a text a block is taken, and Jacobi
decoding of this block begins with random tokens: each state of the trajectory is predicted from the one before. The
loss at each state is the divergence of its predictions from those after the true block, and the cross-entropy of the
true block is added, which keeps the text (CLLM, Kou et al. 2024, section 3.2; here its global loss).

The trained model is another model, so its texts may differ from the first one's. How many are equal, and how probable
the first model finds them, says how far it went. Drafts change no text of either; the script stops if one does.

Command: python recipes/jacobi/train.py --model FOLDER --steps 300
Before:  a small model such as EN10/BabyLlama (0.94 M weights, 105 characters)
Hardware: a CPU, one thread.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

import mmdec

OPENING, LENGTH = 16, 112  # tokens of an opening, and of a text
BATCH, STATES = 8, 3  # texts of a step, and states of each trajectory that are trained on
DRAFTS: dict[str, tuple[str, Any]] = {
    "jacobi, chains of 7": ("jacobi", 7),
    "jacobi, chains of 15": ("jacobi", 15),
    "jacobi, trees of 31": ("jacobi", (31, 15)),
    "lookup, chains of 15": ("lookup", 15),
}


def write_texts(model: Any, count: int) -> Tensor:
    """Return (count, LENGTH) tokens: sampled openings, and the model's greedy continuations."""
    begin = torch.full((count, 1), int(model.config.bos_token_id))
    options: dict[str, Any] = {"pad_token_id": model.config.eos_token_id, "eos_token_id": None}
    opening = model.generate(begin, do_sample=True, top_k=0, max_new_tokens=OPENING - 1, **options)
    return model.generate(opening, do_sample=False, max_new_tokens=LENGTH - OPENING, **options)


@torch.no_grad()
def trajectory(model: Any, before: Tensor, guess: Tensor) -> list[Tensor]:
    """Return the states (B, n) of Jacobi decoding after `before` (B, P), from a first guess to the last but one."""
    states = list[Tensor]()
    for _ in range(guess.shape[1]):
        states.append(guess)
        guess = model(torch.cat([before, guess], 1)).logits[:, before.shape[1] - 1 : -1].argmax(-1)
        if torch.equal(guess, states[-1]):
            break
    return states


def train(model: Any, texts: Tensor, options: argparse.Namespace) -> None:
    """Train a model on the trajectories of its first weights."""
    first, draws = copy.deepcopy(model), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps, pct_start=0.1)
    model.train()
    for step in range(options.steps):
        chosen = texts[torch.randint(len(texts), (BATCH,), generator=draws)]
        cut = int(torch.randint(OPENING, LENGTH - options.block + 1, (), generator=draws))
        before, block = chosen[:, :cut], chosen[:, cut : cut + options.block]
        guess = before.gather(1, torch.randint(cut, block.shape, generator=draws))
        states = trajectory(first, before, guess)
        kept = [states[index] for index in torch.randint(len(states), (STATES,), generator=draws).tolist()]
        blocks = torch.cat([block, *kept])
        logits = model(torch.cat([before.repeat(1 + STATES, 1), blocks], 1)).logits[:, cut - 1 : -1]
        expected, predicted = logits[:BATCH], logits[BATCH:].log_softmax(-1)
        written = cross_entropy(expected.flatten(0, 1), block.flatten())
        goal = expected.detach().log_softmax(-1).repeat(STATES, 1, 1)
        consistency = kl_div(predicted, goal, log_target=True, reduction="sum") / goal[..., 0].numel()
        (consistency + options.keep * written).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step + 1 == options.steps:
            print(f"  step {step}: consistency {consistency.item():.3f}, text {written.item():.3f}", flush=True)
    model.eval()


def measure(model: Any, first: Any, held: Tensor) -> None:
    """Print tokens per round for held-out openings, and how the texts compare with the first model's (N, LENGTH)."""
    options: dict[str, Any] = {"max_new_tokens": LENGTH - OPENING, "do_sample": False, "eos_token_id": None}
    openings = held[:, :OPENING].split(1)
    plain = [mmdec.generate(model, opening, None, **options).sequences for opening in openings]
    made = torch.cat(plain)
    with torch.inference_mode():
        logprobs = first(made).logits[:, OPENING - 1 : -1].log_softmax(-1).gather(2, made[:, OPENING:, None])
    equal = int((made == held).all(1).sum())
    print(f"  texts equal to the first model's: {equal} of {len(held)}", end="; ")
    print(f"log-probability of a token under it: {logprobs.mean().item():.3f}", flush=True)
    for name, (drafter, nodes) in DRAFTS.items():
        rounds = 0
        for opening, text in zip(openings, plain, strict=True):
            out = mmdec.generate(model, opening, drafter, num_speculative_tokens=nodes, **options)
            if not torch.equal(out.sequences, text):
                raise SystemExit(f"error: {name} changed a text")
            rounds += len(out.rounds) - 1  # the first is the pass over the prompt
        tokens = len(held) * (LENGTH - OPENING - 1)
        print(f"  {name}: {tokens / rounds:.2f} tokens per round, {rounds / tokens:.2f} passes per token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a small language model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--block", type=int, default=16, help="tokens of a trajectory")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--keep", type=float, default=1.0, help="weight of the true block's cross-entropy")
    parser.add_argument("--texts", type=int, default=800, help="to train on")
    parser.add_argument("--held", type=int, default=20, help="openings that are decoded, not trained on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    texts, first = write_texts(model, options.texts + options.held), copy.deepcopy(model)
    held = texts[: options.held]
    print("before", flush=True)
    measure(model, first, held)
    train(model, texts[options.held :], options)
    print("after", flush=True)
    measure(model, first, held)


if __name__ == "__main__":
    main()
