"""`make train` builds the phrasebook's corpus where it is missing or not finished."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from mmdec.training.daspeech import timed
from mmdec.types import InputError, MmdecError
from tests.support.pretended_training import Checkout


def test_without_corpus_and_synthesisers_it_says_what_to_install(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    checkout.corpus.lexicon.unlink()  # the tables are there, but the corpus is not finished
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="espeak-ng and flite"):
        timed.missing()


def test_a_corpus_without_its_lexicon_is_built_to_its_end(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lexicon = checkout.corpus.lexicon.read_text(encoding="utf-8")
    calls: list[list[str]] = []

    def build(finishes: bool, code: int) -> Callable[..., SimpleNamespace]:
        def built(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
            assert env["MMDEC_PARENT"] == str(os.getpid())  # it ends with this process
            calls.append(command)
            if finishes:
                checkout.corpus.lexicon.write_text(lexicon, encoding="utf-8")
            return SimpleNamespace(returncode=code)

        return built

    monkeypatch.setattr("shutil.which", lambda program: program)
    timed.missing()
    assert not calls  # finished
    checkout.corpus.lexicon.unlink()
    monkeypatch.setattr("subprocess.run", build(finishes=False, code=1))
    with pytest.raises(MmdecError, match=r"phrasebook\.py --out .* failed with 1"):
        timed.missing()
    monkeypatch.setattr("subprocess.run", build(finishes=True, code=1))  # single recordings failed
    timed.missing()
    assert "training goes on without them" in capsys.readouterr().out
    assert [command[1:] for command in calls] == 2 * [["data/build/phrasebook.py", "--out", "data/corpus"]]
