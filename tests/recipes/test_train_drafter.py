"""Tests `mmdec train drafter`: it trains a drafter for a given model from a list of questions, with and without
pictures, and the same call continues a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner, Result

import mmdec
from mmdec import cli
from mmdec.drafters.networks.training.samples import PromptBuilder, Questions, read_samples
from mmdec.drafters.networks.training.teacher import load_teacher_model
from mmdec.errors import InputError
from mmdec.training.checkpoints import read_checkpoint
from tests.recipes.tiny_squares import ASKED, write_squares, write_target
from tests.support.lightning_warnings import FITTING
from tests.support.tiny_llava import build_tokenizer
from tests.support.tiny_text import language_model

pytestmark = [
    pytest.mark.slow,
    *FITTING,
    pytest.mark.usefixtures("workplace"),
]


def write_llama(folder: Path) -> Path:
    """Return a small Llama with a tokenizer, whose answers repeat themselves."""
    tokenizer = build_tokenizer([*ASKED, *["A red green blue grey square."] * 4], 300)
    model: Any = language_model(vocab_size=len(tokenizer), num_hidden_layers=4)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def call(base: Path, data: Path, *more: object) -> Result:
    words = ["train", "drafter", "--model", base, "--data", data, "--output", "out", "--max-tokens", 10]
    words += ["--minutes", 0.1, *more]
    return CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)


def texts(base: Path, listed: Path, drafter: Any) -> list[list[int]]:
    model, prompting = load_teacher_model(base, torch.float32), PromptBuilder(base)
    return [
        mmdec.generate(model.eval(), prompting(sample), drafter=drafter, max_new_tokens=16).sequences[0].tolist()
        for sample in read_samples(listed, "", Questions())[:2]
    ]


@pytest.mark.parametrize(
    ("system", "head"),
    [
        ("eagle3", None),
        ("eagle", None),
        ("dflash", None),
        ("dflash", "vanilla"),
        ("dflash", "dflash2"),
        ("dflash", "domino"),
        ("heads", None),
        ("heads", "mlp"),
        ("prompt_tokens", None),
    ],
)
def test_a_language_model_gets_a_drafter(system: str, head: str | None, workplace: Path) -> None:
    base, listed = write_llama(workplace / "llama"), workplace / "questions.txt"
    listed.write_text("\n".join(f"{asked} {word}?" for asked in ASKED for word in ["red", "green", "blue", "grey"]))
    result = call(base, listed, "--system", system, "--json", *(() if head is None else ("--head", head)))
    summary, log = json.loads(result.stdout), result.stderr
    assert "on dev: tokens per round in chains" in log
    assert ("chains of 4 give about" in log) == (system not in ("eagle", "prompt_tokens"))
    assert "give about" not in log.split("on dev")[-1]  # answers that were learned by heart promise too much
    assert "tokens per round on held-out answers" in log
    assert summary["output"] == "out/drafter"
    assert summary["chain"] >= 1
    settings = json.loads(Path("out/drafter/config.json").read_text(encoding="utf-8"))
    assert (settings["system"], settings["target"]) == (system, "llama")
    assert head is None or head == settings["kind" if system == "heads" else "head"]
    assert texts(base, listed, "out/drafter") == texts(base, listed, None)


def test_repeating_the_call_resumes(workplace: Path) -> None:
    """A model that reads pictures; of a folder of pictures, each is asked about."""
    base, corpus = write_target(workplace / "base"), write_squares(workplace / "squares")
    pictures = corpus / "images" / "train"
    call(base, pictures, "--prompt", "What colour is it?")
    asked = [json.loads(line) for line in Path("out/questions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["question"] for row in asked] == ["What colour is it?"] * 12
    first = read_checkpoint(Path("out/checkpoints/last.ckpt"))["global_step"]
    answers = next(Path("out/answers").glob("answers-*/*.jsonl")).read_bytes()
    result = call(base, pictures, "--prompt", "What colour is it?")
    assert re.match(r"out/drafter: \d\.\d\d tokens per round on held-out answers in chains", result.stdout)
    assert read_checkpoint(Path("out/checkpoints/last.ckpt"))["global_step"] > first > 0
    assert next(Path("out/answers").glob("answers-*/*.jsonl")).read_bytes() == answers
    settings = json.loads(Path("out/drafter/config.json").read_text(encoding="utf-8"))
    assert (settings["positions"], settings["pictures"]) == ("temporal", "placeholder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--system", "medusa"), "`--system` must be"),
        (("--system", "dflash", "--head", "hydra"), "`--head` must be .*vanilla"),
        (("--system", "eagle", "--head", "hydra"), "`--head` must be left out for eagle"),
        (("--data", "none.csv"), "`--data` must be a file that ends in"),
        (("--model", "no/such/model"), "`--model` must be a model of transformers"),
    ],
)
def test_untrainable_models_are_named(options: tuple[str, ...], message: str, workplace: Path) -> None:
    (workplace / "q.txt").write_text("One?\nTwo?\nThree?\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        call(workplace / "none", workplace / "q.txt", *options)
