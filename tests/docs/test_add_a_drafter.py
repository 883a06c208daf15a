"""The drafter of docs/add_a_drafter.md, which lies outside the package, through every call that takes a drafter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

import mmdec
from docs.examples.toy_drafter import ToyDrafter
from mmdec import cli
from mmdec.drafters import registry
from mmdec.drafters.built_in import built_in_names
from mmdec.generation.drafter_choice import resolve_drafter
from mmdec.pretrained.vlm import load_vlm
from mmdec.vision.describe import available_drafters
from mmdec.whisper.checkpoint import load_whisper
from tests.conftest import buzz
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm_folder import write as write_vlm
from tests.support.tiny_whisper import write

ROOT = Path(__file__).parents[2]
PATH = "docs.examples.toy_drafter:ToyDrafter"
PAGE = (ROOT / "docs" / "add_a_drafter.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
NEW = 40
QUESTION = "What is this?"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the example's name, and that of a drafter with weights; other tests do not see them."""
    monkeypatch.setattr(registry, "_registered", {})
    mmdec.register_drafter("toy", ToyDrafter)
    note = "Toy: what followed the last time."
    mmdec.register_drafter("toy-in-folder", loader=lambda folder, model: ToyDrafter(), auto=True, note=note)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return language_model(eos_token_id=None, initializer_range=0.02)  # repeats itself


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return torch.tensor([[5, 6, 7, 8, 5, 6], [9, 9, 9, 9, 9, 9]])


@pytest.fixture(params=["object", "dotted path", "name", "folder"])
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps({"system": "toy-in-folder"}))
    given = {"object": ToyDrafter(), "dotted path": PATH, "name": "toy", "folder": tmp_path}
    return given[request.param]


def test_generate_stream_and_speculate_give_the_models_own_tokens(
    model: PreTrainedModel, prompt: Tensor, drafter: Any
) -> None:
    plain = model.generate(prompt, max_new_tokens=NEW, do_sample=False)  # type: ignore[operator] # mixed in
    run = mmdec.generate(model, prompt, drafter, max_new_tokens=NEW, num_speculative_tokens=5)
    assert torch.equal(run.sequences, plain)
    assert run.tokens_per_round > 1.2  # it drafts, and drafts are accepted
    rows: list[list[int]] = [[], []]
    for round_ in mmdec.stream(model, prompt, drafter, max_new_tokens=NEW, num_speculative_tokens=5):
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            rows[row] += tokens
    assert rows == plain[:, prompt.shape[1] :].tolist()
    loop = mmdec.speculate(drafter, num_speculative_tokens=5)
    for _ in range(2):  # the object serves many calls
        options = {"max_new_tokens": NEW, "do_sample": False, "custom_generate": loop}
        assert torch.equal(model.generate(prompt, **options), plain)  # type: ignore[operator] # mixed in


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    write(folder / "whisper")
    mmdec.audio.save_audio(folder / "sound.wav", buzz(0.9))
    return folder


def test_transcribe_gives_the_models_own_tokens(whisper: Path, drafter: Any) -> None:
    loaded = load_whisper(whisper / "whisper", "cpu")
    options: dict[str, Any] = {"model": loaded, "num_speculative_tokens": 4}
    plain = mmdec.transcribe(whisper / "sound.wav", drafter=None, **options)
    drafted = mmdec.transcribe(whisper / "sound.wav", drafter=drafter, **options)
    assert (drafted.text, drafted.tokens) == (plain.text, plain.tokens)
    assert len(plain.tokens) > 2


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a vision-language model and a picture."""
    folder = tmp_path_factory.mktemp("sees")
    write_vlm(folder / "vlm")
    Image.fromarray(picture()).save(folder / "picture.png")
    return folder


def picture() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (30, 40, 3)).astype(np.uint8)


def test_describe_and_chat_give_the_models_own_tokens(sees: Path, drafter: Any) -> None:
    options: dict[str, Any] = {"model": load_vlm(sees / "vlm", "cpu"), "num_speculative_tokens": 4}
    plain = mmdec.describe([picture(), ()], QUESTION, drafter=None, **options)
    drafted = mmdec.describe([picture(), ()], QUESTION, drafter=drafter, **options)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert sum(answer.drafted for answer in drafted) > 0
    chats = [mmdec.Chat(drafter=choice, **options) for choice in (None, drafter)]
    for _ in range(2):
        undrafted, other = (chat.ask(QUESTION, picture()) for chat in chats)
        assert other.tokens == undrafted.tokens


def test_describe_finds_the_drafter_beside_the_model(sees: Path) -> None:
    """It is found as "toy-in-folder", which is registered for "auto", by its name and unasked."""
    folder = sees / "vlm-toy-in-folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"system": "toy-in-folder"}))
    vlm = load_vlm(sees / "vlm", "cpu")
    toy = resolve_drafter("toy-in-folder", vlm).drafter_for(vlm.model)
    assert isinstance(toy, ToyDrafter)
    assert resolve_drafter("auto", vlm).drafter_for(vlm.model) is toy
    assert available_drafters(vlm) == {"toy-in-folder": "Toy: what followed the last time."}


CALLS = {
    "transcribe": ["transcribe", "sound.wav", "--model", "whisper"],
    "describe": ["describe", "picture.png", "--model", "vlm", "--prompt", "What is this?"],
}


@pytest.mark.parametrize("subcommand", CALLS)
def test_command_line_takes_the_dotted_path(
    whisper: Path, sees: Path, subcommand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir({"transcribe": whisper, "describe": sees}[subcommand])
    call = [*CALLS[subcommand], "--device", "cpu", "--json", "--drafter"]
    plain, drafted = (CliRunner().invoke(cli.app, [*call, drafter]) for drafter in ("none", PATH))
    assert (plain.exit_code, drafted.exit_code) == (0, 0), plain.output + drafted.output
    assert json.loads(plain.stdout)["text"] == json.loads(drafted.stdout)["text"]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_of_the_page_run(number: int) -> None:
    exec(compile(BLOCKS[number], f"add_a_drafter.md:{number}", "exec"), {})


def test_example_is_short() -> None:
    lines = (ROOT / "docs" / "examples" / "toy_drafter.py").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("class "))
    assert len([line for line in lines[begin:] if line.strip()]) <= 30


def refused(match: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(mmdec.InputError, match=match):
        call(*arguments, **options)


def test_objects_that_are_not_drafters_are_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    refused("must be one of lookup, recycling, jacobi, toy, a drafter's folder", mmdec.speculate, "looking")
    refused("must be one of", mmdec.speculate, tmp_path / "nowhere")
    refused("must be importable, but 'docs.examples.toy_drafter:Toy' is not", mmdec.speculate, PATH[:-7])
    refused("must be importable", mmdec.speculate, "no_such_package.module:Class")
    refused("must be made without arguments", mmdec.speculate, "mmdec.drafters.medusa.drafter:MedusaDrafter")
    refused("must name a class", mmdec.speculate, "mmdec.core.tree_shape:MAX_RANKS")
    refused("`drafter` must be an object with", mmdec.speculate, "builtins:dict")
    refused("must be a folder for medusa, which has weights", mmdec.speculate, "medusa")
    refused("has no config.json", mmdec.load_drafter, tmp_path, model)
    (tmp_path / "config.json").write_text("[]")
    refused("as a JSON object", mmdec.load_drafter, tmp_path, model)
    (tmp_path / "config.json").write_text('{"system": "daspeech"}')
    systems = ", ".join([*built_in_names("speech_weights"), *built_in_names("language_weights"), "toy-in-folder"])
    refused(f"must hold a drafter of {systems}, but .* holds 'daspeech'", mmdec.load_drafter, tmp_path, model)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    refused("`folder` must hold.*pass the loaded model", mmdec.load_drafter, tmp_path, model)
    prompt = torch.tensor([[1, 2, 3]])
    refused("`drafter` must hold", mmdec.generate, model, prompt, tmp_path, max_new_tokens=2)
    model.save_pretrained(tmp_path / "smaller")  # a smaller language model drafts
    assert mmdec.load_drafter(tmp_path / "smaller", model).name.startswith("small-model")
    refused("`folder` must be a path", mmdec.load_drafter, 3, model)
    refused("`model` must be a loaded model", mmdec.load_drafter, tmp_path, "llama")


def test_names_are_checked_when_they_are_registered() -> None:
    refused("is one of mmdec's own drafters", mmdec.register_drafter, "lookup", ToyDrafter)
    refused("must be letters, digits", mmdec.register_drafter, "my/toy", ToyDrafter)
    refused("`factory` must be given", mmdec.register_drafter, "empty")
    refused("must be a function or a dotted path", mmdec.register_drafter, "odd", 3)
    refused("`auto` needs a drafter with weights", mmdec.register_drafter, "odd", ToyDrafter, auto=True)
    refused("`note` must be text", mmdec.register_drafter, "odd", ToyDrafter, note=3)


def test_load_drafter_reads_heads(whisper: Path, model: PreTrainedModel, prompt: Tensor) -> None:
    loaded = load_whisper(whisper / "whisper", "cpu")
    heads = mmdec.load_drafter(whisper / "whisper" / "medusa", loaded.model)
    assert heads.name == loaded.own_drafter("medusa").name
    folder = str(whisper / "whisper" / "medusa")
    loop = mmdec.speculate(folder)
    assert loop.drafter_for(loaded.model) is loop.drafter_for(loaded.model)  # read once
    refused("must be a loaded encoder-decoder", mmdec.generate, model, prompt, folder, max_new_tokens=2)
