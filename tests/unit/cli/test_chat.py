"""Tests `mmdec chat`: answers from a pipe are those of the public call on the dialogue so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import mmdec
from mmdec import cli
from mmdec.cli import text_chat
from mmdec.pretrained.language_model import load_language_model
from tests.support import tiny_text_folder, tiny_vlm_folder

TURNS = ["Once upon a time there was a dog.", "Nobody knows why.", "Would you like some tea?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chat") / "talks"
    return tiny_text_folder.write(home, tiny_text_folder.OTHER, 3, chat=True, max_position_embeddings=400)


def chat(folder: Path, lines: list[str], *options: object) -> Result:
    words = ["chat", str(folder), "--device", "cpu", "--threads", "1", *map(str, options)]
    return CliRunner().invoke(cli.app, words, input="".join(f"{line}\n" for line in lines))


def answers(folder: Path, turns: list[str], system: str | None = None, **options: Any) -> list[str]:
    """The answers of the public call, which reads the whole dialogue at each turn."""
    loaded = load_language_model(folder, "cpu")
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        inputs = loaded.chat_inputs(messages)
        seed = number + options["seed"] if "seed" in options else None
        out = mmdec.generate(loaded.model, inputs, drafter=None, **{**options, "seed": seed})
        new = out.sequences[0, inputs["input_ids"].shape[1] :]
        messages.append({"role": "assistant", "content": loaded.tokenizer.decode(new, skip_special_tokens=True)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("drafter", ["auto", "none", "recycling"])
def test_each_line_of_a_pipe_is_a_turn_of_one_dialogue(folder: Path, drafter: str) -> None:
    wanted = answers(folder, TURNS, max_new_tokens=12, do_sample=False)
    result = chat(folder, [TURNS[0], "", *TURNS[1:]], "--max-new-tokens", 12, "--temperature", 0, "-d", drafter)
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{answer}\n" for answer in wanted)
    notes = [line for line in result.stderr.splitlines() if "tokens per round" in line]
    assert len(notes) == len(TURNS)
    assert "set `--max-new-tokens`" in notes[0] or "cut" not in notes[0]


def test_a_smaller_model_drafts_with_options(folder: Path) -> None:
    wanted = answers(folder, TURNS[:1], max_new_tokens=12, do_sample=False)
    options = ("--max-new-tokens", 12, "--temperature", 0, "--drafter-inner", "lookup", "--drafter-prompt", 16)
    result = chat(folder, TURNS[:1], *options, "-d", folder)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{wanted[0]}\n"
    for given, message in (
        (("-d", folder, "--drafter-inner", "eagle"), "`--drafter-inner` must be a drafter without weights"),
        (("-d", folder, "--drafter-prompt", 3), "`--drafter-prompt` must be a whole number from 16"),
        (("-d", "recycling", "--drafter-inner", "lookup"), "`--drafter` must be a loaded model, a model's folder"),
    ):
        wrong = chat(folder, TURNS[:1], *given)
        assert wrong.exit_code
        assert message in str(wrong.exception)


def test_system_seed_and_temperature(folder: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.5}
    wanted = answers(folder, TURNS[:2], "Be short.", seed=7, **options)
    given = ("--system", "Be short.", "--seed", 7, "--temperature", 1.5, "--max-new-tokens", 10)
    assert chat(folder, TURNS[:2], *given).stdout == "".join(f"{answer}\n" for answer in wanted)


def test_exit_ends_the_chat(folder: Path) -> None:
    result = chat(folder, [TURNS[0], "/exit", TURNS[1]], "--max-new-tokens", 3)
    assert result.exit_code == 0
    assert result.stderr.count("tokens per round") == 1


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, interrupted = text_chat.TextChat.answer, list[str]()

    def stopped(talk: text_chat.TextChat, question: str) -> Iterator[str]:
        pieces = answer(talk, question)
        interrupted.append(next(pieces))
        yield interrupted[-1]
        if len(interrupted) == 1:
            pieces.close()  # type: ignore[attr-defined] # a generator
            raise KeyboardInterrupt
        yield from pieces

    monkeypatch.setattr(text_chat.TextChat, "answer", stopped)
    result = chat(folder, TURNS[:2], "--max-new-tokens", 8, "--temperature", 0)
    assert result.exit_code == 0, result.output
    first, rest = result.stdout[: len(interrupted[0])], result.stdout[len(interrupted[0]) + 1 :]
    assert first == interrupted[0]
    loaded = load_language_model(folder, "cpu")
    turns = [(TURNS[0], "user"), (interrupted[0], "assistant"), (TURNS[1], "user")]
    inputs = loaded.chat_inputs([{"role": role, "content": text} for text, role in turns])
    out = mmdec.generate(loaded.model, inputs, drafter=None, max_new_tokens=8, do_sample=False).sequences
    new = out[0, inputs["input_ids"].shape[1] :]
    assert rest == loaded.tokenizer.decode(new, skip_special_tokens=True) + "\n"
    assert "; stopped]" in result.stderr


def test_later_turns_read_only_what_is_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pasts = list[int]()
    cached_length, generate_rounds = text_chat.cached_length, text_chat.generate_rounds

    def noted(model: Any, inputs: Any, *rest: Any) -> Any:
        pasts.append(cached_length(inputs[text_chat.CACHE_ARGUMENT]))
        return generate_rounds(model, inputs, *rest)

    monkeypatch.setattr(text_chat, "generate_rounds", noted)
    chat(folder, TURNS[:2], "--max-new-tokens", 4, "--temperature", 0)
    loaded = load_language_model(folder, "cpu")
    first = loaded.chat_inputs([{"role": "user", "content": TURNS[0]}])["input_ids"]
    assert pasts[0] == 0
    assert pasts[1] in (0, first.shape[1] + 3)  # 0 if the tokens of the answer are not those of its text


def test_a_dialogue_that_is_too_long_is_one_error(folder: Path) -> None:
    result = chat(folder, ["a dog " * 300, TURNS[0]], "--max-new-tokens", 3)
    assert result.exit_code == 1
    assert "positions" in result.stderr
    assert result.stderr.count("tokens per round") == 1


def test_other_models_are_refused(tmp_path: Path, folder: Path) -> None:
    result = chat(tiny_vlm_folder.write(tmp_path / "vlm"), TURNS)
    assert "`model` must be a language model" in str(result.exception)
    plain = tiny_text_folder.write(tmp_path / "plain", tiny_text_folder.OTHER, 1)
    result = chat(plain, TURNS[:1])
    assert (result.exit_code, "chat template" in result.stderr) == (1, True)
    assert torch.is_inference_mode_enabled() is False
