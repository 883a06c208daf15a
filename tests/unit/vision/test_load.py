"""Tests the models and drafters that `describe` takes: folders, loaded ones, names; and errors for wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmdec
from mmdec.drafters import built_in, registry
from mmdec.drafters.eagle.eagle import EagleInputNetwork
from mmdec.drafters.lookup import LookupDrafter
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.registry import built_in_network, network_class
from mmdec.errors import InputError
from mmdec.generation.drafter_choice import DrafterChoice, resolve_drafter
from mmdec.hub.find import drafter_folder
from mmdec.pretrained.vlm import LoadedVlm, load_vlm
from mmdec.vision.describe import available_drafters
from tests.support.pictures import QUESTION, pixels
from tests.support.tiny_vlm_folder import QWEN_TEMPLATE, drafter_weights, llava, qwen, settings, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "models" / "tiny")


def drafter_of(vlm: LoadedVlm, choice: DrafterChoice) -> Any:
    """Return the drafter that a call with this model and `drafter=choice` uses."""
    return resolve_drafter(choice, vlm).drafter_for(vlm.model)


@pytest.mark.parametrize(
    ("name", "value"), [("eos_token_id", "x"), ("eos_token_id", -5), ("pad_token_id", 10**9), ("suppress_tokens", "a")]
)
def test_a_broken_generation_config_is_refused_when_it_is_read(folder: Path, name: str, value: object) -> None:
    settings(folder, "generation_config.json", **{name: value})
    with pytest.raises(InputError, match=f"`{name}` must be .*generation config"):
        load_vlm(folder, "cpu")


def test_a_system_is_found_inside_the_model_s_folder_and_beside_it(folder: Path) -> None:
    vlm = load_vlm(folder, "cpu")
    plain = mmdec.describe(pixels(0), QUESTION, model=vlm, drafter=None)
    assert isinstance(drafter_of(vlm, "auto"), LookupDrafter)
    for name in ("eagle", "msd"):
        with pytest.raises(
            InputError, match=f"`drafter` must have weights for this model, but '{name}' has none"
        ) as caught:
            mmdec.describe(pixels(0), QUESTION, model=vlm, drafter=name)
        assert "lookup, recycling" in str(caught.value)
    drafter_weights("msd", vlm.model, folder.with_name("tiny-msd"))
    assert drafter_folder(folder, "msd") == folder.with_name("tiny-msd").resolve()
    automatic: Any = drafter_of(vlm, "auto")
    assert automatic is drafter_of(vlm, "msd")  # read once
    drafter_weights("eagle", vlm.model, folder / "eagle")
    assert drafter_of(vlm, "auto") is not automatic  # the first of those that there are
    for drafter in ("auto", "eagle", "msd", folder / "eagle", str(folder / "eagle")):
        out = mmdec.describe(pixels(0), QUESTION, model=folder, device="cpu", drafter=drafter, num_speculative_tokens=4)
        assert out.tokens == plain.tokens
        assert out.drafted > 0
    with pytest.raises(InputError, match="`drafter` must be one of lookup, recycling"):
        mmdec.describe(pixels(0), QUESTION, model=vlm, drafter="eagel")


def test_a_drafter_name_wins_over_a_folder_of_that_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds in `generate` and `transcribe`."""
    here = tmp_path / "here"
    for name in ("lookup", "eagle"):
        (here / name).mkdir(parents=True)  # a folder without weights
    monkeypatch.chdir(here)
    vlm = load_vlm(folder.resolve(), "cpu")
    assert isinstance(drafter_of(vlm, "lookup"), LookupDrafter)
    drafter_weights("eagle", vlm.model, folder / "eagle")
    named: Any = drafter_of(vlm, "eagle")
    assert named.name.startswith("eagle")


@built_in_network("new", note="New: as EAGLE.")
class NewNetwork(EagleInputNetwork):
    """A new drafter's network: here EAGLE's layer under another name."""

    config_class = DraftConfig


def test_a_new_drafter_needs_only_a_name_in_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network is found, saved and read, "auto" takes it, and the demo, which asks here, shows it with its note."""
    monkeypatch.setitem(built_in.BUILT_IN, "new", built_in.BuiltIn(__name__, "language_weights"))
    vlm = load_vlm(folder, "cpu")
    assert available_drafters(vlm) == {}
    drafter_weights("new", vlm.model, folder / "new")
    assert available_drafters(vlm) == {"new": "New: as EAGLE."}
    automatic: Any = drafter_of(vlm, "auto")
    assert isinstance(automatic.network, NewNetwork)
    plain = mmdec.describe(pixels(0), QUESTION, model=vlm, drafter=None)
    drafted = mmdec.describe(pixels(0), QUESTION, model=vlm, num_speculative_tokens=4)
    assert drafted.tokens == plain.tokens
    assert drafted.drafted > 0
    drafter_weights("eagle", vlm.model, folder.with_name("tiny-eagle"))
    assert list(available_drafters(vlm)) == ["eagle", "new"]  # in the registry's order
    assert drafter_of(vlm, "auto") is drafter_of(vlm, "eagle")


def test_automatic_drafters_have_weights_and_a_note() -> None:
    names = ["eagle3", "eagle", "msd", "vispec", "specvlm", "flash", "dflash", "heads", "prompt_tokens"]
    assert registry.auto_names() == names
    for name in registry.auto_names():
        entry = registry.drafter_entry(name)
        assert entry is not None
        assert entry.note.endswith(".")
        assert network_class(name).system == name


def test_a_model_without_a_folder_has_no_systems() -> None:
    model, processor = llava()
    with pytest.raises(InputError, match="the caller loaded it"):
        mmdec.describe(pixels(0), QUESTION, model=model, processor=processor, drafter="eagle")


def test_compressor_choices_are_reported(folder: Path) -> None:
    vlm = load_vlm(folder, "cpu")
    drafter_weights("specvlm", vlm.model, folder / "specvlm")
    images: list[Any] = [pixels(0), (), (pixels(1), pixels(2))]
    call: dict[str, Any] = {"model": vlm, "drafter": "specvlm", "num_speculative_tokens": (4, 2)}
    result = mmdec.describe(images, QUESTION, **call)
    assert [len(answer.visual_weights or ()) for answer in result] == [4, 0, 8]  # visual tokens
    assert result[0].compressor
    assert all(0 <= share <= 1 for share in result[0].visual_weights or ())
    assert json.loads(json.dumps(result[0].to_dict()))["visual_weights"] == result[0].visual_weights
    plain = mmdec.describe(images, QUESTION, model=vlm, drafter=None)
    assert [answer.tokens for answer in result] == [answer.tokens for answer in plain]
    assert plain[0].visual_weights is None


def test_chat_takes_a_drafter_with_weights(folder: Path) -> None:
    vlm = load_vlm(folder, "cpu")
    drafter_weights("msd", vlm.model, folder / "msd")
    drafted = mmdec.Chat(model=vlm, drafter="msd", num_speculative_tokens=3)
    plain = mmdec.Chat(model=vlm, drafter=None)
    for turn in (("What is this?", pixels(0)), ("And this?", (pixels(1), pixels(2))), ("So?", ())):
        answer = drafted.ask(*turn)
        assert answer.tokens == plain.ask(*turn).tokens
        assert answer.drafted > 0


def test_a_qwen_is_read_without_torchvision(tmp_path: Path) -> None:
    model, processor = qwen()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    expected = mmdec.describe(pixels(0), QUESTION, model=model, processor=processor)
    assert mmdec.describe(pixels(0), QUESTION, model=tmp_path, device="cpu").tokens == expected.tokens
    half = mmdec.describe(pixels(0), QUESTION, model=tmp_path, device="cpu", dtype=torch.bfloat16)
    assert half.tokens
    assert load_vlm(tmp_path, "cpu", torch.bfloat16).model.dtype == torch.bfloat16
    assert load_vlm(tmp_path, "cpu").model.dtype == torch.float32


def spoil(folder: Path) -> None:
    """Return a weight that is not a number."""
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("weight"))
    state[name] = state[name] * float("nan")
    save_file(state, folder / "model.safetensors", {"format": "pt"})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {  # what is done to the folder, and what is said of it
    "another kind": (
        lambda folder: settings(folder, "config.json", model_type="bert"),
        "must be a vision-language model, but .* is 'bert'",
    ),
    "a Whisper": (
        lambda folder: settings(folder, "config.json", model_type="whisper"),
        "is 'whisper'. Name a LLaVA",
    ),
    "odd settings": (lambda folder: settings(folder, "config.json", text_config=7), "damaged or of another version"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"), "is 'no model'"),
    "no settings": (lambda folder: (folder / "config.json").unlink(), "is 'no model'"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "`model` must"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "`(model|processor)` must"),
    "no processor": (lambda folder: (folder / "processor_config.json").unlink(), "`(model|processor)` must"),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(), "`(model|processor)` must"),
    "no number": (spoil, "finite weights"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_one_error(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(InputError, match=message):
        mmdec.describe(pixels(0), QUESTION, model=folder, device="cpu")


@pytest.fixture(scope="module")
def pairs() -> dict[str, Any]:
    """Return two models, their processors, and none."""
    (model, processor), (other, foreign) = llava(), qwen()
    linear = torch.nn.Linear(2, 2)
    return {"llava": model, "its": processor, "qwen": other, "foreign": foreign, "linear": linear, "none": None}


@pytest.mark.parametrize(
    ("model", "processor", "message"),
    [
        ("llava", "none", "`processor` must be a processor"),
        ("llava", "foreign", "`processor` must write an image as token"),
        ("qwen", "its", "`processor` must write an image as token"),
        ("linear", "its", "`model` must be a name"),
    ],
)
def test_model_and_processor_must_fit(pairs: dict[str, Any], model: str, processor: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mmdec.describe(pixels(0), QUESTION, model=pairs[model], processor=pairs[processor])


def test_a_processor_is_for_a_model_that_its_user_loaded(pairs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`processor` must be left out"):
        mmdec.describe(pixels(0), QUESTION, model="vlm-scenes", processor=pairs["its"])


def test_a_model_in_training_mode_is_refused() -> None:
    model, processor = llava()
    with pytest.raises(InputError, match="evaluation mode"):
        LoadedVlm(model.train(), processor)


def test_a_chat_template_must_be_there_and_place_the_images() -> None:
    model, processor = llava()
    processor.chat_template = processor.tokenizer.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        LoadedVlm(model, processor)
    processor.chat_template = "{% for message in messages %}hello{% endfor %}"
    with pytest.raises(InputError, match="must place each of the 1 images"):
        mmdec.describe(pixels(0), QUESTION, model=model, processor=processor)
    processor.chat_template = QWEN_TEMPLATE.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", processor.image_token
    )
    assert mmdec.describe(pixels(0), QUESTION, model=model, processor=processor).tokens
