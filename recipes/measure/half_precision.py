r"""Measures decoding in half precision on a CPU: whether drafts change a text, and what plain decoding costs.

python recipes/measure/half_precision.py --model MODEL --dtype bfloat16 --text docs/reference/language_models.md
python recipes/measure/half_precision.py --model WHISPER --dtype float16 --recordings a.wav b.wav c.wav d.wav

Each text is decoded alone and with three others, plainly and by each drafter with several sizes. The cost is the
CPU time of plain decoding, divided by that of the model's own passes over one token, measured in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mmdec
from mmdec.errors import exit_on_error
from mmdec.whisper.transcribe import load_transcriber

ROWS = 4
SIZES = {"lookup": (4, 12), "recycling": ((12, 4), (24, 6), None), "ctc": (4, 12, None), "hypothesis": (8, None)}
OWN_PASSES: Mapping[str, Callable[..., Any]] = {  # replaces what makes passes independent of the draft
    "mmdec.targets.decoder.tokenwise_copy": lambda model: None,
    "mmdec.whisper.decoder.is_half_on_cpu": lambda module: False,
    "mmdec.whisper.target.is_half_on_cpu": lambda module: False,
    "mmdec.whisper.output_layer.is_half_on_cpu": lambda module: False,
}
Decode = Callable[..., list[list[int]]]  # drafter, options -> tokens of each row


def parted(name: str, drafters: Sequence[tuple[str, Any]], decode: Decode) -> list[list[int]]:
    """Print for each drafter and size how many texts differ from those of plain decoding, which are returned."""
    plain = decode(None)
    for drafter, source in drafters:
        for size in SIZES[drafter]:
            options = {} if size is None else {"num_speculative_tokens": size}
            drafted = decode(source, **options)
            differ = sum(text != plain_text for text, plain_text in zip(drafted, plain, strict=True))
            print(f"{name} | {drafter} {size or 'budget'} | {differ} of {len(plain)} texts differ", flush=True)
    return plain


def cost(decode: Callable[[], Any], pairs: int) -> None:
    """Print the quartiles of the CPU time of plain decoding, divided by that of the model's own passes."""

    def seconds(names: Mapping[str, Callable[..., Any]]) -> float:
        with ExitStack() as stack:
            for name, function in names.items():
                stack.enter_context(patch(name, function))
            start = time.process_time()
            decode()
            return time.process_time() - start

    ratios = [seconds({}) / seconds(OWN_PASSES) for _ in range(pairs + 1)][1:]  # the first warms up
    print("plain decoding costs (quartiles) " + " ".join(f"{part:.3f}" for part in quantiles(ratios, n=4)), flush=True)


def measure_text(options: argparse.Namespace) -> None:
    """Measure a language model on parts of a text."""
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
    page = AutoTokenizer.from_pretrained(options.model)(options.text.read_text("utf-8"))["input_ids"]
    named = {"max_new_tokens": options.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def inputs(texts: Sequence[int]) -> dict[str, torch.Tensor]:
        lengths = [30 + 17 * text for text in texts]
        starts = [29 * text for text in texts]
        rows = [page[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        rows = [[page[0]] * (max(lengths) - len(row)) + row for row in rows]
        mask = [[0] * (max(lengths) - length) + [1] * length for length in lengths]
        return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}

    count = options.count // ROWS * ROWS
    for rows in (1, ROWS):
        batches = [inputs(range(start, start + rows)) for start in range(0, count, rows)]

        def decode(drafter: Any, batches: Any = batches, **more: Any) -> list[list[int]]:
            results = [mmdec.generate(model, batch, drafter, **named, **more) for batch in batches]
            return [row[-options.new :].tolist() for result in results for row in result.sequences]

        plain = parted(f"{rows} rows", [(name, name) for name in ("lookup", "recycling")], decode)
        stock = [row[-options.new :].tolist() for batch in batches for row in model.generate(**batch, **named)]
        differ = sum(text != plain_text for text, plain_text in zip(stock, plain, strict=True))
        print(f"{rows} rows | stock generate | {differ} of {count} texts differ", flush=True)
    once = inputs([4])
    cost(lambda: mmdec.generate(model, once, None, **named), options.pairs)


def measure_speech(options: argparse.Namespace) -> None:
    """Measure a Whisper on recordings."""
    model = load_transcriber(options.model, dtype=options.dtype)
    drafters: list[tuple[str, Any]] = [("lookup", "lookup"), ("recycling", "recycling")]
    drafters += [("ctc", options.ctc)] if options.ctc else []
    texts = [mmdec.transcribe(path, model="whisper-tiny.en", drafter=None).text for path in options.recordings]
    for rows in (1, ROWS):

        def decode(drafter: Any, rows: int = rows, **more: Any) -> list[list[int]]:
            tokens = list[list[int]]()
            for start in range(0, len(options.recordings), rows):
                part = slice(start, start + rows)
                given = mmdec.hypothesis(texts[part]) if drafter == "hypothesis" else drafter
                results = mmdec.transcribe(
                    options.recordings[part], model=model, drafter=given, batch_size=rows, language="en", **more
                )
                tokens += [list(result.tokens) for result in results]
            return tokens

        parted(f"{rows} rows", [*drafters, ("hypothesis", "hypothesis")], decode)
    cost(lambda: mmdec.transcribe(options.recordings[:1], model=model, drafter=None, language="en"), options.pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a language model or a Whisper")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), required=True)
    parser.add_argument("--text", type=Path, help="a text whose parts the language model continues")
    parser.add_argument("--recordings", nargs="*", help="what the Whisper transcribes")
    parser.add_argument("--ctc", help="folder of the Whisper's CTC drafter")
    parser.add_argument("--count", type=int, default=20, help="texts for each drafter and size")
    parser.add_argument("--new", type=int, default=32, help="new tokens of each text")
    parser.add_argument("--pairs", type=int, default=8, help="measurements of the cost")
    options = parser.parse_args(arguments)
    options.dtype = getattr(torch, options.dtype)
    measure_speech(options) if options.recordings else measure_text(options)


if __name__ == "__main__":
    with exit_on_error():
        main()
