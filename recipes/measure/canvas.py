"""Measures the tables of docs/guide/diffusion.md: right answers and passes of each policy, with and without drafts.

python recipes/measure/canvas.py --model runs/diffusion-lists/model --count 50
python recipes/measure/canvas.py --model runs/diffusion-stories/model --writer runs/babyllama --count 40

Without `--writer` the model answers list tasks. With it, the model continues texts of this autoregressive model, which
then says how likely the continuations are. Passes are counted, not timed, so the figures do not depend on the machine's
load.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import mmdec
from mmdec import CanvasOptions
from mmdec.core.canvas import EntropyBound, LearnedFilter, Policy, ProgressSchedule, Threshold, TopK
from mmdec.errors import exit_on_error
from mmdec.targets.masked_diffusion import CanvasLayout
from mmdec.targets.training.block_diffusion import LIST_TASKS, SPECIAL_UNITS, ListTasks
from mmdec.targets.training.reveal_filter import fit_filter

DRAFTS = (4,)  # canvases a pass
Score = Callable[[Tensor], list[float]]  # of each row's new tokens


def policies(model: Any, prompts: Sequence[Tensor]) -> dict[str, Policy]:
    """List the policies; the filter is trained on the model's answers to these prompts."""
    layout = CanvasLayout("block", model.config.block_length, model.config.mask_token_id)
    return {
        "top-k 1": TopK(1),
        "top-k 2": TopK(2),
        "top-k 4": TopK(4),
        "top-k 8": TopK(8),
        "threshold 0.9": Threshold(0.9),
        "threshold 0.5": Threshold(0.5),
        "entropy bound 0.1": EntropyBound(0.1),
        "entropy bound 1": EntropyBound(1.0),
        "schedule": ProgressSchedule(),
        "learned filter": LearnedFilter(fit_filter(model, layout, prompts)),
    }


def measure(model: Any, prompts: Tensor, new: int, policy: Policy, score: Score) -> tuple[list[float], list[float]]:
    """Decode prompts (B, P) without and with drafts.

    Returns:
        The score of each row, and the tokens per pass without drafts and with each number of `DRAFTS`.

    Raises:
        AssertionError: If drafts changed a text.
    """
    results = [
        mmdec.diffusion_generate(
            model, prompts, CanvasOptions(policy, drafts=drafts), max_new_tokens=new, eos_token_id=None
        )
        for drafts in (1, *DRAFTS)
    ]
    for result in results[1:]:
        assert torch.equal(result.sequences, results[0].sequences), "drafts changed a text"
    return score(results[0].sequences[:, prompts.shape[1] :]), [result.tokens_per_pass for result in results]


def list_scores(lists: Tensor, task: int, answers: Tensor) -> Score:
    """Return a function that gives each answer 1.0 if it is right, else 0.0."""

    def score(new: Tensor) -> list[float]:
        if LIST_TASKS[task] != "shuffle":
            return (new == answers).all(1).float().tolist()
        length = lists.shape[1]
        same_items = (new[:, :length].sort(1).values == lists.sort(1).values).all(1)
        return (same_items & (new[:, length:] == SPECIAL_UNITS.index("<end>")).all(1)).float().tolist()

    return score


def likelihood(writer: Any, prompts: Tensor) -> Score:
    """Return a function that gives the mean log-probability of each row's tokens under an autoregressive model."""

    def score(new: Tensor) -> list[float]:
        ids = torch.cat([prompts, new], 1)
        with torch.inference_mode():
            logprobs = writer(ids).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
        return logprobs.gather(2, new[..., None])[..., 0].mean(1).tolist()

    return score


def row(name: str, scores: Sequence[Sequence[float]], rates: Sequence[Sequence[float]]) -> str:
    """Format a row of the table: mean scores, then tokens per pass, averaged over the tasks."""
    cells = [f"{sum(values) / len(values):.2f}" for values in scores]
    return " | ".join(
        ["", name, *cells, *(f"{sum(rate) / len(rate):.2f}" for rate in zip(*rates, strict=True)), ""]
    ).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the masked diffusion model")
    parser.add_argument("--writer", type=Path, help="folder of the autoregressive model; without it: list tasks")
    parser.add_argument("--count", type=int, default=50, help="texts, or lists of each task")
    parser.add_argument("--length", type=int, default=7, help="items of a list, or new tokens of a text")
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    draws = torch.Generator().manual_seed(7)
    jobs = list[tuple[str, Tensor, int, Score]]()
    if options.writer is None:
        data = ListTasks(items=model.config.vocab_size - len(SPECIAL_UNITS), shortest=2, longest=options.length)
        data.block_length = model.config.block_length
        for task, name in enumerate(LIST_TASKS):
            batch = data.questions(options.length, torch.full((options.count,), task), draws)
            prompts, answers = batch.tokens[:, : batch.prompt], batch.tokens[:, batch.prompt :]
            jobs.append((name, prompts, answers.shape[1], list_scores(prompts[:, 1:-1], task, answers)))
        known = data.questions(options.length, torch.arange(200) % len(LIST_TASKS), draws)
        learned = known.tokens[:, : known.prompt]
    else:
        writer: Any = AutoModelForCausalLM.from_pretrained(options.writer, dtype=torch.float32).eval()
        torch.manual_seed(7)
        begin = torch.full((options.count + 100, 1), int(writer.config.bos_token_id))
        seen, end = torch.ones_like(begin), writer.config.eos_token_id
        texts = writer.generate(
            begin, attention_mask=seen, do_sample=True, top_k=0, max_new_tokens=24, pad_token_id=end
        )
        prompts, learned = texts[: options.count], texts[options.count :]
        jobs.append(("log-probability", prompts, options.length, likelihood(writer, prompts)))
    names = [name for name, *_ in jobs]
    print(" | ".join(["", "policy", *names, "tokens per pass", *(f"{drafts} drafts" for drafts in DRAFTS), ""]).strip())
    for name, policy in policies(model, list(learned)).items():
        scores, rates = zip(
            *(measure(model, prompts, new, policy, score) for _, prompts, new, score in jobs), strict=True
        )
        print(row(name, scores, rates), flush=True)


if __name__ == "__main__":
    with exit_on_error():
        main()
