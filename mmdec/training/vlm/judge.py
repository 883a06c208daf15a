"""How often the small model is right, by task, on a split of the scenes.

python -m mmdec.training.vlm.judge --model models/vlm-scenes --corpus data/scenes --split test --count 300

Answers are greedy. A short answer must be the reference's (of a count, the total), a description is judged by its
claims. `--swap` shows each question another picture: what is still right then is what the language alone tells.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mmdec.corpora.image_text import read_conversations
from mmdec.metrics.answer_score import claims_held, right_answer
from mmdec.training.vlm.data import Question, Questions, choose, question_loader
from mmdec.training.vlm.module import LONGEST
from mmdec.training.vlm.tokens import prefix


def answers(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question]
) -> Iterator[tuple[Question, str]]:
    """Each question with what the model says, batch by batch."""
    config: Any = model.config
    dataset = Questions(questions, tokenizer, config.vision_config.image_size, prefix(config.image_seq_length))
    for batch in question_loader(dataset):
        longest = LONGEST[batch.questions[0].task == "describe"]
        generated: Any = model.generate(  # type: ignore[attr-defined, misc] # pyright does not bind its protocol
            input_ids=batch.tokens,
            attention_mask=batch.mask,
            pixel_values=batch.pixels.to(model.dtype) / 127.5 - 1,
            do_sample=False,
            max_new_tokens=longest,
        )
        texts = tokenizer.batch_decode(generated[:, batch.tokens.shape[1] :], skip_special_tokens=True)
        yield from zip(batch.questions, (text.strip() for text in texts), strict=True)


def swapped(questions: Sequence[Question]) -> list[Question]:
    """Each question with the picture of the next one of its task that has another."""
    tasks: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        tasks[question.task].append(question)
    exchanged: list[Question] = []
    for group in tasks.values():
        for index, question in enumerate(group):
            images = (other.image for other in [*group[index:], *group] if other.image != question.image)
            exchanged.append(replace(question, image=next(images, question.image)))
    return exchanged


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's, of 95 %."""
    z, share = 1.96, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def judge(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question]
) -> dict[str, dict[str, Any]]:
    """Of each task: right, asked (claims of descriptions), share and its interval."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for question, answer in answers(model, tokenizer, questions):
        described = question.task == "describe"
        claims = question.claims
        counts[question.task][0] += (
            claims_held(answer, claims)
            if described
            else right_answer(answer, question.reference, question.expected, question.task)
        )
        counts[question.task][1] += len(claims) if described else 1
    return {
        task: {"right": right, "asked": count, "share": right / count, "interval": interval(right, count)}
        for task, (right, count) in sorted(counts.items())
        if count
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/vlm-scenes"))
    parser.add_argument("--corpus", type=Path, default=Path("data/scenes"))
    parser.add_argument("--split", default="test")
    parser.add_argument("--count", type=int, default=300, help="questions of each task")
    parser.add_argument("--swap", action="store_true", help="show another picture")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    questions = choose(read_conversations(options.corpus / f"{options.split}.json"), options.count)
    scores = judge(model, tokenizer, swapped(questions) if options.swap else questions)
    for task, row in scores.items():
        low, high = row["interval"]
        print(f"{task:12} {100 * row['share']:5.1f} % ({100 * low:.1f} to {100 * high:.1f})  n {row['asked']}")
    if options.json:
        options.json.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
