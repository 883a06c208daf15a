r"""Trains heads of every kind side by side on the same answers of a language model, and decodes held-out prompts.

python recipes/measure/heads.py --model MODEL [--questions questions.txt]

The model answers questions, one on each line, or continues openings that it has sampled itself. Each kind is trained on
the same batches with the same schedule, and shares the model's LM head. Held-out prompts are decoded with chains and
with trees; each text must equal the model's own. Tokens per round do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import mmdec
from mmdec.drafters.heads.network import Heads
from mmdec.drafters.heads.training.module import HeadsModule
from mmdec.drafters.networks.training.data import frequent_tokens
from mmdec.drafters.networks.training.samples import Inputs
from mmdec.drafters.networks.training.teacher import TargetFeatures, Teacher, load_teacher_model

OPENING = 12  # number of sampled tokens in an opening
ANSWER_BATCH = 32  # number of prompts that are answered at once
TREE_NODES = 16


def kinds(levels: int, size: int) -> dict[str, dict[str, Any]]:
    """Return name -> settings of the heads. All have `levels` levels.

    Args:
        size: The model's hidden size.
    """
    return {
        "Medusa": {"kind": "medusa", "heads": levels},
        "Medusa, attention (Amphista)": {"kind": "medusa", "heads": levels, "attention": True},
        "Hydra": {"kind": "hydra", "heads": levels},
        "Hydra++": {"kind": "hydra", "heads": levels, "blocks": 4, "prefix_layer": True},
        "ReDrafter": {"kind": "recurrent", "inner_size": size},
        "MLPSpeculator": {"kind": "mlp", "heads": levels, "tied": True, "scale_input": True},
        "Hydra, two blocks (KOALA)": {"kind": "hydra", "heads": levels, "blocks": 2},
        "Hydra, previous head (Cerberus)": {"kind": "hydra", "heads": levels, "previous_head": True},
    }


def prompts_of(teacher: Teacher, folder: str, questions: Path | None, count: int) -> list[Inputs]:
    """Return the input tensors of the questions, or of `count` openings that the model samples after its BOS token."""
    if questions is None:
        begin = torch.full((count, 1), teacher.config.bos_token_id, device=teacher.device)
        model: Any = teacher.model
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": OPENING, "min_new_tokens": OPENING}
        rows = model.generate(begin, attention_mask=torch.ones_like(begin), pad_token_id=teacher.pad, **options)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        lines = questions.read_text(encoding="utf-8").splitlines()[:count]
        chats = [[{"role": "user", "content": line}] for line in lines]
        asked = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        rows = [tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0] for text in asked]
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in rows]


def train(module: HeadsModule, texts: list[TargetFeatures], options: argparse.Namespace) -> None:
    """Train the module's network; the same seed gives all kinds the same batches."""
    order = Random(options.seed)
    optimizer = torch.optim.AdamW(module.network.parameters(), lr=options.lr, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    for _ in range(options.steps):
        optimizer.zero_grad()
        module.loss(order.sample(texts, options.batch))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(module.network.parameters(), 0.5)
        optimizer.step()
        decay.step()


def decode(teacher: Teacher, drafter: Any, prompts: list[Inputs], expected: list[Tensor], nodes: Any) -> float:
    """Return the tokens per round of greedy decoding, without the pass over the prompt.

    Raises:
        RuntimeError: If a text is not the model's own.
    """
    tokens = rounds = 0
    for prompt, text in zip(prompts, expected, strict=True):
        length = text.shape[1] - prompt["input_ids"].shape[1]
        options = {"num_speculative_tokens": nodes, "max_new_tokens": length, "do_sample": False}
        made = mmdec.generate(teacher.model, prompt, drafter, **options)
        if not torch.equal(made.sequences, text):
            raise RuntimeError(f"{drafter.name} changed the text of {prompt['input_ids'].tolist()}.")
        tokens, rounds = tokens + length - 1, rounds + len(made.rounds) - 1
    return tokens / rounds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hugging Face id of a language model")
    parser.add_argument("--questions", type=Path, help="a file with a question on each line; default: openings")
    parser.add_argument("--answers", type=int, default=600, help="to train on")
    parser.add_argument("--held", type=int, default=24, help="prompts that are decoded, not trained on")
    parser.add_argument("--tokens", type=int, default=96, help="maximum tokens of an answer")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=0, help="of the loss, as HeadsModule's; default: all")
    parser.add_argument("--kinds", nargs="*", help="names; default: all")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    teacher = Teacher(load_teacher_model(options.model, torch.float32))
    prompts = prompts_of(teacher, options.model, options.questions, options.answers + options.held)
    held, trained = prompts[: options.held], prompts[options.held :]
    plain = {"max_new_tokens": options.tokens, "do_sample": False}
    expected = [mmdec.generate(teacher.model, prompt, None, **plain).sequences for prompt in held]
    texts: list[TargetFeatures] = []
    for begin in range(0, len(trained), ANSWER_BATCH):
        part = trained[begin : begin + ANSWER_BATCH]
        answers = [(sample, answer) for sample, answer in zip(part, teacher.answer(part, options.tokens), strict=True)]
        answers = [(sample, answer) for sample, answer in answers if len(answer) > 1]
        needs = HeadsModule().training_needs(Heads.config_class.like(teacher.config))
        texts += teacher.compute_features(*map(list, zip(*answers, strict=True)), needs)  # type: ignore[arg-type]
    print(json.dumps({"answers": len(texts), "tokens": sum(len(text.answer) for text in texts)}), flush=True)
    for name, settings in kinds(options.levels, teacher.config.hidden_size).items():
        if options.kinds and name not in options.kinds:
            continue
        module = HeadsModule(network=settings, unroll=options.levels, unroll_decay=0.8, chain=options.levels)
        module.frozen_teacher, module.names = (teacher,), {"base": teacher.name, "target": Path(options.model).name}
        module.network = module.first_network().to(teacher.device)
        module.needs = module.training_needs(module.network.config)
        if options.vocabulary:
            module.compared_tokens = frequent_tokens((text.answer for text in texts), options.vocabulary)
        train(module, texts, options)
        drafter = module.network.eval().make_drafter(*_ends(teacher))
        row = {"kind": name, "weights": sum(weight.numel() for weight in module.network.parameters())}
        for shape, nodes in (("chain", options.levels), ("tree", (TREE_NODES, options.levels))):
            row[shape] = round(decode(teacher, drafter, held, expected, nodes), 3)  # type: ignore[assignment]
        print(json.dumps(row), flush=True)


def _ends(teacher: Teacher) -> tuple[Any, Any]:
    return teacher.model.get_input_embeddings(), teacher.model.get_output_embeddings()


if __name__ == "__main__":
    main()
