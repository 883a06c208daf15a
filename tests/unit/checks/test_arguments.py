"""Tests invalid arguments: each gives one clear error, the same in every call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import mmdec
from mmdec.checks.arguments import MAX_NODES, MAX_THREADS, UnknownOption, did_you_mean, format_value
from mmdec.cli import app
from mmdec.drafters.lookup import LookupDrafter
from mmdec.hub.cache import LoadedModels
from mmdec.pretrained.vlm import LoadedVlm, load_vlm
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.conftest import RATE, buzz
from tests.support import tiny_vlm_folder
from tests.support.tiny_text import language_model
from tests.support.tiny_whisper import write

BENCHES = ("bench speech x.wav", "bench kernels", "bench drafters -m whisper-tiny.en")
IDS = torch.tensor([[1, 2, 3, 1, 2, 3]])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return language_model(vocab_size=60)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    return load_whisper(write(tmp_path_factory.mktemp("models") / "tiny"), "cpu")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> LoadedVlm:
    return load_vlm(tiny_vlm_folder.write(tmp_path_factory.mktemp("models") / "tiny"), "cpu")


def refused(call: Callable[[], Any], start: str, *parts: str) -> str:
    with pytest.raises(mmdec.InputError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(start), text
    assert " must " in text
    assert " but " in text
    assert text.endswith(".")
    assert "\n" not in text
    for part in parts:
        assert part in text
    return text


ENTRY_POINTS: tuple[Callable[..., Any], ...] = (mmdec.generate, mmdec.stream)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ("text", "'text'"),
        (None, "None"),
        (["a", "b"], "['a', 'b']"),
        ({}, "nothing"),
        ({"ids": IDS}, "'ids'"),
        ({"input_ids": [[1, 2]]}, "return_tensors"),
        (IDS.float(), "torch.float32"),
        (IDS > 1, "torch.bool"),
        (IDS[0], "(6,)"),
        (IDS[:, :0], "(1, 0)"),
        (IDS + 57, "between 0 and 59"),
        (IDS - 2, "between 0 and 59"),
    ],
)
def test_wrong_inputs_are_refused(
    model: PreTrainedModel, entry_point: Callable[..., Any], inputs: Any, part: str
) -> None:
    refused(lambda: entry_point(model, inputs), "`input", part)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("wrong", ["gpt2", None, 3, LlamaForCausalLM, torch.nn.Linear(2, 2), {}])
def test_objects_that_are_not_models_are_refused(entry_point: Callable[..., Any], wrong: Any) -> None:
    refused(lambda: entry_point(wrong, IDS), "`model` must be a loaded model of transformers", format_value(wrong))


@pytest.mark.parametrize("wrong", [None, 3, b"x", "", LlamaForCausalLM, [], np.zeros(3)])
def test_objects_that_are_not_speech_models_are_refused(wrong: Any) -> None:
    for call in (mmdec.translate_speech, mmdec.transcribe):
        refused(lambda call=call: call(buzz(0.3), sample_rate=RATE, model=wrong), "`model` must be a")


class Half:
    """Misses most of what a drafter does."""

    name = "half"

    def propose(self) -> None: ...


@pytest.mark.parametrize(
    "wrong", [3, [], Half(), LookupDrafter, object(), b"lookup", np.array(["lookup", "x"]), {"a": 1}]
)
def test_objects_that_are_not_drafters_are_refused(model: PreTrainedModel, whisper: LoadedWhisper, wrong: Any) -> None:
    for call in (
        lambda: mmdec.speculate(wrong),
        lambda: mmdec.generate(model, IDS, wrong),
        lambda: mmdec.stream(model, IDS, wrong),
        lambda: mmdec.transcribe(buzz(0.3), sample_rate=RATE, model=whisper, drafter=wrong),
    ):
        refused(call, "`drafter` must ")


@pytest.mark.parametrize(
    "wrong", ["a", "4", 10**6, MAX_NODES + 1, -1, 2.5, True, float("nan"), (4, 0), (1, 2, 3), {}, ("a", 2)]
)
def test_wrong_draft_sizes_are_refused(model: PreTrainedModel, whisper: LoadedWhisper, wrong: Any) -> None:
    for call in (
        lambda: mmdec.speculate("lookup", num_speculative_tokens=wrong),
        lambda: mmdec.generate(model, IDS, num_speculative_tokens=wrong),
        lambda: mmdec.stream(model, IDS, num_speculative_tokens=wrong),
        lambda: mmdec.transcribe(
            buzz(0.3), sample_rate=RATE, model=whisper, drafter="lookup", num_speculative_tokens=wrong
        ),
    ):
        refused(call, "`num_speculative_tokens` must be ")


@pytest.mark.parametrize("wrong", ["2", 0, -1, 10**9, MAX_THREADS + 1, 2.0, True, float("inf"), [2], np.array([1, 2])])
def test_wrong_thread_counts_are_refused(tiny_model: Path, whisper: LoadedWhisper, wrong: Any) -> None:
    before = torch.get_num_threads()
    sound = {"audio": buzz(0.3), "sample_rate": RATE, "threads": wrong}
    refused(lambda: mmdec.translate_speech(model=tiny_model, **sound), "`threads` must be a whole number from 1 to ")
    refused(lambda: mmdec.transcribe(model=whisper, **sound), "`threads` must be a whole number from 1 to ")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "subcommand",
    ["translate x.wav -o out", "transcribe x.wav", "eval speech", "eval asr", *BENCHES],
)
def test_wrong_thread_counts_on_the_command_line_are_refused(
    subcommand: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "english").mkdir(parents=True)
    (tmp_path / "data" / "english" / "a.tsv").write_text("path\ttext\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*subcommand.split(), "--threads", str(10**9)])
    assert isinstance(done.exception, mmdec.InputError)
    assert "`--threads` must be a whole number" in str(done.exception)


def test_wrong_seeds_rules_and_listeners_are_refused(model: PreTrainedModel) -> None:
    for seed in ("1", 1.5, 2**70, True, []):
        refused(lambda seed=seed: mmdec.generate(model, IDS, seed=seed), "`seed` must be ")
    for rule in ("best", 3, ["greedy"], np.array(["greedy", "sampled"])):
        refused(lambda rule=rule: mmdec.speculate("lookup", rule=rule), "`rule` must be one of ")  # type: ignore[arg-type]
    for wrong in (3, "print", int):
        refused(lambda wrong=wrong: mmdec.speculate("lookup", on_round=wrong), "`on_round` must be ")
        refused(lambda wrong=wrong: mmdec.speculate("lookup", streamer=wrong), "`streamer` must be ")
        refused(lambda wrong=wrong: mmdec.stream(model, IDS, tokenizer=wrong), "`tokenizer` must be ")


class Failing(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        raise RuntimeError("the line is cut")


def test_closed_and_failing_files_are_refused(tiny_model: Path, whisper: LoadedWhisper) -> None:
    closed = io.BytesIO(b"RIFF")
    closed.close()
    for file, part in ((closed, "closed file"), (Failing(), "the line is cut")):
        refused(lambda file=file: mmdec.audio.load_audio(file), "`audio` must be a file that can be read", part)
        for call, loaded in ((mmdec.translate_speech, tiny_model), (mmdec.transcribe, whisper)):
            with pytest.raises(mmdec.InputError, match="can be read"):
                call(file, model=loaded)  # type: ignore[operator]
            with pytest.raises(mmdec.BatchError, match="1 of 2 recordings") as caught:
                call([file, buzz(0.4)], sample_rate=RATE, model=loaded)  # type: ignore[operator]
            assert caught.value.results[1].text is not None


def test_the_message_names_the_callers_options_alone(model: PreTrainedModel, whisper: LoadedWhisper) -> None:
    text = refused(
        lambda: mmdec.transcribe(
            buzz(0.3), sample_rate=RATE, model=whisper, drafter=None, language="en", repetition_penalty=-1.0, top_k=5
        ),
        "`options` must be what `model.generate` takes",
        "(`repetition_penalty`, `top_k`)",
    )
    assert "temperature" not in text
    assert "`task`" not in text
    refused(lambda: mmdec.generate(model, IDS, temperature="hot", do_sample=True), "`options` must ", "`temperature`")
    for name in ("logits_processor", "stopping_criteria"):
        refused(lambda name=name: mmdec.generate(model, IDS, **{name: [3]}), f"`{name}` must be a list of functions")
    refused(lambda: mmdec.generate(model, IDS, num_beams=4), "`num_beams` must be 1, but is 4. ", "Pass 1, or")
    config = GenerationConfig(num_beams=4, max_new_tokens=3)
    refused(lambda: mmdec.generate(model, IDS, generation_config=config), "`num_beams` must be 1, but is 4. ")
    refused(
        lambda: mmdec.generate(model, IDS, num_return_sequences=10**9), "`num_return_sequences` must be a whole number"
    )
    refused(lambda: mmdec.generate(model, IDS, custom_generate="x"), "`custom_generate` must be left out")
    refused(
        lambda: mmdec.generate(model, {"input_ids": IDS, "attention_mask": IDS}, attention_mask=IDS), "`attention_mask`"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [("max_new_tokns", "max_new_tokens"), ("temprature", "temperature"), ("statistic", "statistics"), ("qqqqqq", "")],
)
def test_a_misspelt_option_is_refused_in_one_sentence(
    given: str, meant: str, model: PreTrainedModel, whisper: LoadedWhisper
) -> None:
    sentence = f"`{given}` must be an option of this call or of `model.generate`, but it is not one."
    sentence += f" Did you mean '{meant}'? Check the spelling." if meant else " Check the spelling."
    options: dict[str, Any] = {given: 4}
    heard = {"sample_rate": RATE, "model": whisper, "drafter": None}
    assert refused(lambda: mmdec.generate(model, IDS, top_k=5, **options), sentence) == sentence
    assert refused(lambda: mmdec.transcribe(buzz(0.3), **heard, **options), sentence) == sentence


def test_a_misspelt_option_suggests_one_of_the_call(whisper: LoadedWhisper) -> None:
    heard = {"sample_rate": RATE, "model": whisper, "drafter": None}
    refused(lambda: mmdec.transcribe(buzz(0.3), **heard, min_confidense=0.5), "`min_confidense`", "'min_confidence'?")


def test_an_unknown_option_is_refused_before_anything_is_read(
    model: PreTrainedModel, whisper: LoadedWhisper, vlm: LoadedVlm
) -> None:
    """No network runs, and the missing files are not even looked for."""
    networks = (model, whisper.model.get_encoder(), whisper.model.get_decoder(), vlm.model)
    passes = list[object]()
    hooks = [network.register_forward_pre_hook(lambda one, _: passes.append(one)) for network in networks]
    try:
        for call in (
            lambda **options: mmdec.transcribe("missing.wav", model=whisper, drafter=None, **options),
            lambda **options: mmdec.transcribe(["missing.wav"] * 2, model=whisper, drafter=None, **options),
            lambda **options: mmdec.transcribe_stream([], model=whisper, drafter=None, **options),
            lambda **options: mmdec.describe("missing.png", model=vlm, drafter=None, **options),
            lambda **options: mmdec.describe(["missing.png"] * 2, model=vlm, drafter=None, **options),
            lambda **options: mmdec.Chat(model=vlm, drafter=None, **options),
            lambda **options: mmdec.generate(model, IDS, drafter=None, **options),
            lambda **options: mmdec.generate(model, [IDS, IDS], drafter=None, **options),
            lambda **options: mmdec.stream(model, IDS, drafter=None, **options),
        ):
            refused(lambda call=call: call(nonsense=1), "`nonsense` must be an option of this call")
        with pytest.raises(TypeError, match="nonsense"):  # there are no further options
            mmdec.translate_speech("missing.wav", nonsense=1)  # type: ignore[call-overload]
    finally:
        for hook in hooks:
            hook.remove()
    assert not passes


def test_errors_of_the_callers_functions_are_raised_unchanged(whisper: LoadedWhisper) -> None:
    def progress(done: float, whole: float) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mmdec.transcribe(buzz(0.3), sample_rate=RATE, model=whisper, drafter=None, progress=progress)


def test_shown_values_are_short_and_reproducible() -> None:
    assert format_value("x" * 500) == "'" + "x" * 76 + "..."
    assert format_value(object()) == format_value(object()) == "an object"
    assert format_value(Half()) == "an object of type Half"
    assert format_value(10**5000) == "a huge int"
    assert format_value(LookupDrafter) == "the class LookupDrafter"
    assert format_value((1, "a")) == "(1, 'a')"
    assert format_value([[1]]) == "[...]"
    assert format_value(torch.zeros(3)) == "an object of type Tensor"


def test_a_misspelt_name_suggests_the_nearest() -> None:
    assert did_you_mean("eagel", ["eagle", "msd"]) == " Did you mean 'eagle'?"
    assert did_you_mean("whatever", ["eagle", "msd"]) == did_you_mean(3, ["eagle"]) == ""
    with pytest.raises(mmdec.InputError, match="Did you mean 'eagle'"):
        mmdec.speculate("eagel")


def test_an_unknown_option_travels_between_processes() -> None:
    error = UnknownOption("max_new_token", ["max_new_tokens", "seed"])
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.name, copied.names) == (str(error), error.name, error.names)


def test_a_copy_of_shared_models_begins_empty() -> None:
    shared = LoadedModels[int]()
    assert shared.get("a", lambda: 1) == 1
    assert copy.deepcopy(shared).get("a", lambda: 2) == 2
