"""Tests the scores of the diffusion tables, and that the command prints a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmdec.targets.training.block_diffusion import LIST_TASKS, SPECIAL_UNITS
from recipes.measure.canvas import likelihood, list_scores, main
from tests.support.tiny_text import language_model

END = SPECIAL_UNITS.index("<end>")


def test_a_list_is_right_as_a_whole() -> None:
    lists, answers = torch.tensor([[9, 8], [9, 8]]), torch.tensor([[8, 9, END], [8, 9, END]])
    new = torch.tensor([[8, 9, END], [8, 9, 9]])
    assert list_scores(lists, LIST_TASKS.index("sort"), answers)(new) == [1.0, 0.0]


def test_any_order_is_a_right_shuffle() -> None:
    lists = torch.tensor([[9, 8, 7]]).expand(4, -1)
    new = torch.tensor([[7, 9, 8, END], [9, 8, 7, END], [9, 9, 7, END], [7, 9, 8, 8]])
    assert list_scores(lists, LIST_TASKS.index("shuffle"), new)(new) == [1.0, 1.0, 0.0, 0.0]


def test_likelihood_is_the_mean_over_new_tokens() -> None:
    model, prompts, new = language_model("llama"), torch.tensor([[1, 5]]), torch.tensor([[6, 7]])
    logprobs = model(torch.tensor([[1, 5, 6, 7]])).logits.detach().log_softmax(-1)[0]
    expected = float(logprobs[1, 6] + logprobs[2, 7]) / 2
    assert likelihood(model, prompts)(new) == [pytest.approx(expected, abs=1e-5)]


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = language_model("qwen2")
    model.config.mask_token_id, model.config.block_length = 60, 4
    model.save_pretrained(tmp_path / "model")
    main([f"--model={tmp_path / 'model'}", "--count=2", "--length=3"])
    lists = capsys.readouterr().out.splitlines()
    assert lists[0].startswith("| policy | copy | reverse | sort | shuffle | tokens per pass | 4 drafts")
    assert len(lists) == 11
    main([f"--model={tmp_path / 'model'}", f"--writer={tmp_path / 'model'}", "--count=2", "--length=4"])
    assert capsys.readouterr().out.startswith("| policy | log-probability | tokens per pass")
