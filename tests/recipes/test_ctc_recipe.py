"""Tests the CTC head's recipe on a tiny corpus: it learns, and a resumed run gives the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.drafters.ctc.training.module import load_ctc_recogniser
from tests.recipes.small_recipes import MARKS, check_same_weights, checkpoint, fit, logged
from tests.support.tiny_sentences import SIZES, write
from tests.support.tiny_whisper import write as write_whisper

pytestmark = [pytest.mark.slow, *MARKS]


def test_the_recipe_learns_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    corpus, whole, parts = write(tmp_path / "corpus"), tmp_path / "whole", tmp_path / "parts"
    model = {**SIZES, "warmup": 2, "lr": "5e-3"}
    data = {
        "corpus": corpus / "manifest.tsv",
        "encoder": corpus / "whisper",
        "states": corpus / "states",
        "pieces": corpus / "pieces.json",
        "text": f"[{corpus / 'text'}]",
        "count": 40,
        "batch_states": 60,
        "steps_per_epoch": 5,
    }
    fit("ctc/french", whole, model, data)
    fit("ctc/french", parts, model, data, f"--ckpt_path={checkpoint(whole, 4)}")
    check_same_weights(checkpoint(whole, 9), checkpoint(parts, 9))
    losses = [float(row["dev/ctc"]) for row in logged(whole, "dev/ctc")]
    assert losses[-1] < losses[0]
    assert load_ctc_recogniser(checkpoint(whole, 9), str(corpus / "whisper")).head.config.d_states == 32


def test_a_head_that_drafts_learns_from_the_models_own_transcripts(tmp_path: Path) -> None:
    corpus, whole, parts = write(tmp_path / "corpus"), tmp_path / "whole", tmp_path / "parts"
    whisper = write_whisper(tmp_path / "whisper", with_heads=False, max_target_positions=24)
    model = {**SIZES, "stride": 1, "warmup": 2, "lr": "5e-3"}
    data = {
        "corpora": f"{{{corpus / 'manifest.tsv'}: en}}",
        "model": whisper,
        "states": corpus / "drafts",
        "pieces": corpus / "tokens.json",
        "batch_states": 90,
        "steps_per_epoch": 5,
    }
    fit("ctc/drafts", whole, model, data)
    fit("ctc/drafts", parts, model, data, f"--ckpt_path={checkpoint(whole, 4)}")
    check_same_weights(checkpoint(whole, 9), checkpoint(parts, 9))
    losses = [float(row["dev/ctc"]) for row in logged(whole, "dev/ctc")]
    assert losses[-1] < losses[0]
