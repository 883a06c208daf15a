"""Tests model folders that are damaged or link to other places: each gives an InputError before any computation."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

import mmdec
from mmdec.checks.weights import check_finite_weights, check_layer_counts, read_settings, read_weights, weight_files
from mmdec.daspeech.checkpoint import WEIGHT_FILES
from mmdec.daspeech.training.vocoder import load_acoustic
from mmdec.drafters.medusa.checkpoint import load_heads
from mmdec.training.checkpoints import read_checkpoint
from mmdec.whisper.checkpoint import load_whisper
from tests.support.tiny_whisper import network, processor, write

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def whisper(pristine: Path, tmp_path: Path) -> Path:
    """Return a Whisper of the test's own, to spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "whisper"))


def split(folder: Path) -> dict[str, str]:
    """Write the same weights in two shards. Returns the index's map."""
    state = load_file(folder / WHOLE)
    names = {name: PARTS[number % 2] for number, name in enumerate(sorted(state))}
    for part in PARTS:
        save_file({name: state[name] for name in state if names[name] == part}, folder / part, {"format": "pt"})
    (folder / WHOLE).unlink()
    index(folder, names)
    return names


def index(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def spoil(file: Path, value: float, place: int = 0) -> str:
    """Put NaN or infinity into a tensor; returns its name."""
    state = load_file(file)
    name = sorted(name for name, tensor in state.items() if tensor.is_floating_point())[place]
    state[name].view(-1)[-1] = value
    save_file(state, file, {"format": "pt"})
    return name


def assert_refused(load: Callable[[], Any], message: str) -> None:
    with pytest.raises(mmdec.InputError, match=message) as caught:
        load()
    text = str(caught.value)
    assert text.startswith("`")
    assert " must " in text
    assert " but " in text
    assert text.endswith(".")


def test_shards_give_what_one_file_gives(whisper: Path, pristine: Path) -> None:
    split(whisper)
    whole = load_whisper(pristine, "cpu").model.state_dict()
    for name, tensor in load_whisper(whisper, "cpu").model.state_dict().items():
        assert torch.equal(tensor, whole[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model-00002-of-00002.bin", r"must hold its weights as safetensors, but .*pytorch_model-00002"),
        ("../outside.safetensors", r"in its own folder, but '\.\./outside\.safetensors' of .* lies outside"),
        ("/outside.safetensors", "in its own folder"),
        ("deeper/model.safetensors", "in its own folder"),
        ("..\\outside.safetensors", "in its own folder"),
        ("link.safetensors", r"'link\.safetensors' of .* lies outside"),
        ("loop.safetensors", "outside|lacks"),
        ("model-00009-of-00002.safetensors", r"lacks 'model-00009-of-00002\.safetensors'"),
        ("\0.safetensors", "`model` must hold"),
        ("\ud800.safetensors", r"'\\ud800\.safetensors'"),
        ("x" * 300 + ".safetensors", "`model` must hold"),
    ],
)
def test_a_shard_is_a_safetensors_file_inside_the_folder(whisper: Path, name: str, message: str) -> None:
    names = split(whisper)
    part = whisper / PARTS[1]
    (whisper / "deeper").mkdir()
    for copy in (whisper / "deeper" / WHOLE, whisper.parent / "outside.safetensors"):
        shutil.copy(part, copy)
    (whisper / "link.safetensors").symlink_to(whisper.parent / "outside.safetensors")
    (whisper / "loop.safetensors").symlink_to(whisper / "loop.safetensors")
    torch.save(load_file(part), whisper / "pytorch_model-00002-of-00002.bin")
    if name.startswith("/"):
        name = str(whisper.parent / name[1:])
    index(whisper, {tensor: name if file == PARTS[1] else file for tensor, file in names.items()})
    assert_refused(lambda: load_whisper(whisper, "cpu"), message)


def test_pickled_shards_are_refused(whisper: Path) -> None:
    names = split(whisper)
    pickles = {part: f"pytorch_{Path(part).stem}.bin" for part in PARTS}
    for part, pickle in pickles.items():
        torch.save(load_file(whisper / part), whisper / pickle)
        (whisper / part).unlink()
    index(whisper, {tensor: pickles[part] for tensor, part in names.items()})
    assert_refused(lambda: load_whisper(whisper, "cpu"), "Pickles are not read")


def test_a_weight_file_must_not_link_out_of_its_folder(whisper: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.move(whisper / WHOLE, tmp_path / "elsewhere.safetensors")
    (whisper / WHOLE).symlink_to(tmp_path / "elsewhere.safetensors")
    assert_refused(lambda: load_whisper(whisper, "cpu"), "lies outside")
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    shutil.move(copy / "encoder.safetensors", tmp_path / "encoder.safetensors")
    (copy / "encoder.safetensors").symlink_to(tmp_path / "encoder.safetensors")
    assert_refused(lambda: mmdec.load(copy, "cpu"), "lies outside")


def test_heads_must_not_link_out_of_the_models_folder(whisper: Path, tmp_path: Path) -> None:
    shutil.move(whisper / "medusa", tmp_path / "heads")
    (whisper / "medusa").symlink_to(tmp_path / "heads")
    result = load_whisper(whisper, "cpu")
    assert_refused(partial(result.own_drafter, "medusa"), "leads outside")
    assert result.read_drafter(tmp_path / "heads").needs.layers == (-1,)  # named by the caller, they may lie anywhere


def test_a_snapshot_of_the_hub_links_into_its_own_blobs(pristine: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--whisper"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    for number, file in enumerate(path for path in pristine.rglob("*") if path.is_file()):
        shutil.copy(file, repository / "blobs" / f"{number:040x}")
        link = snapshot / file.relative_to(pristine)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / f"{number:040x}", link.parent))
    whisper = load_whisper(snapshot, "cpu")
    assert whisper.own_drafter("medusa").heads.config.heads == 3
    shutil.copy(pristine / WHOLE, tmp_path / "outside.safetensors")
    (snapshot / WHOLE).unlink()
    (snapshot / WHOLE).symlink_to(tmp_path / "outside.safetensors")
    assert_refused(lambda: load_whisper(snapshot, "cpu"), "lies outside")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(whisper: Path, tiny_model: Path, tmp_path: Path, value: float) -> None:
    name = spoil(whisper / "medusa" / "heads.safetensors", value)
    good = load_whisper(whisper, "cpu")
    assert_refused(
        partial(good.own_drafter, "medusa"),
        f"finite weights, but '{name}' in .*heads.safetensors' holds NaN or infinity",
    )
    name = spoil(whisper / WHOLE, value, 7)
    assert_refused(lambda: load_whisper(whisper, "cpu"), f"finite weights, but '{name}'")
    for file in WEIGHT_FILES:
        copy = Path(shutil.copytree(tiny_model, tmp_path / file))
        name = spoil(copy / file, value)
        assert_refused(lambda copy=copy: mmdec.load(copy, "cpu"), f"finite weights, but '{name}' in .*{file}")
    voice = tmp_path / "voice"
    SpeechT5HifiGan(SpeechT5HifiGanConfig(upsample_initial_channel=16)).save_pretrained(voice)
    name = spoil(voice / WHOLE, value)
    assert_refused(
        lambda: mmdec.load(tiny_model, "cpu", vocoder=voice), f"`vocoder` must hold finite weights, but '{name}'"
    )
    torch.save({"state_dict": {"a.weight": torch.tensor([1.0, value])}}, tmp_path / "step=1.ckpt")
    assert_refused(
        lambda: read_checkpoint(tmp_path / "step=1.ckpt"), "`checkpoint` must hold finite weights, but 'a.weight'"
    )


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, 1e300], dtype=torch.float64), torch.tensor([complex(1, math.nan)])]
)
def test_weights_that_float32_does_not_hold_are_named(value: torch.Tensor) -> None:
    assert_refused(lambda: check_finite_weights({"a.weight": value}, Path(WHOLE)), "finite weights, but 'a.weight'")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_an_endless_config_is_refused(whisper: Path, make: Callable[[Path], None]) -> None:
    (whisper / "config.json").unlink()
    make(whisper / "config.json")
    assert_refused(lambda: load_whisper(whisper, "cpu"), "`model` must be a Whisper")
    assert_refused(lambda: read_settings(whisper / "config.json"), "it is not a regular file")


def test_weights_that_are_missing_are_one_error(whisper: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = load_file(whisper / WHOLE)
    del state["model.encoder.layer_norm.weight"]
    save_file(state, whisper / WHOLE, {"format": "pt"})
    assert_refused(lambda: load_whisper(whisper, "cpu"), "lacks 'model.encoder.layer_norm.weight', 1 in all")
    assert "MISSING" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", WHOLE, "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe{}", b"[" * 100_000])
def test_files_with_other_contents_are_refused(whisper: Path, file: str, content: bytes) -> None:
    (whisper / file).write_bytes(content)
    assert_refused(lambda: load_whisper(whisper, "cpu"), "`model` must")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.999])
def test_truncated_files_are_refused(whisper: Path, share: float) -> None:
    for file in ("generation_config.json", WHOLE, "tokenizer.json", "config.json"):
        content = (whisper / file).read_bytes()
        (whisper / file).write_bytes(content[: int(share * len(content))])
        assert_refused(lambda: load_whisper(whisper, "cpu"), "`model` must")
        (whisper / file).write_bytes(content)
    load_whisper(whisper, "cpu")


def test_older_folders_have_the_settings_of_generate_in_config_json(whisper: Path) -> None:
    (whisper / "generation_config.json").unlink()
    change(whisper / "config.json", max_length=77, suppress_tokens=[4, 5], begin_suppress_tokens=[4])
    settings = load_whisper(whisper, "cpu").model.generation_config
    assert (settings.max_length, settings.suppress_tokens) == (77, [4, 5])


def test_absent_and_misshapen_weights_are_named(whisper: Path) -> None:
    state = load_file(whisper / WHOLE)
    name = "model.decoder.layers.1.fc1.weight"
    save_file({key: tensor for key, tensor in state.items() if key != name}, whisper / WHOLE, {"format": "pt"})
    assert_refused(lambda: load_whisper(whisper, "cpu"), f"lacks '{name}', 1 in all")
    save_file(state | {name: state[name][:-1].clone()}, whisper / WHOLE, {"format": "pt"})
    assert_refused(lambda: load_whisper(whisper, "cpu"), rf"'{name}' in .* is \(47, 32\) and not \(48, 32\)")


@pytest.mark.parametrize(
    "values",
    [
        {"d_model": 48},
        {"d_model": 10**9},
        {"d_model": "32"},
        {"decoder_layers": 10**9},
        {"decoder_attention_heads": 0},
        {"vocab_size": -1},
        {"max_target_positions": 10**12},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"activation_function": "rm"},
    ],
)
def test_settings_that_contradict_the_weights_are_refused(whisper: Path, values: dict[str, Any]) -> None:
    change(whisper / "config.json", **values)
    assert_refused(lambda: load_whisper(whisper, "cpu"), "`model` must")


@pytest.mark.parametrize("key", ["transformers_weights", "attn_implementation", "auto_map"])
def test_settings_that_name_other_paths_or_code_are_ignored(whisper: Path, key: str) -> None:
    change(whisper / "config.json", **{key: {"AutoConfig": "code.Trap"} if key == "auto_map" else "../elsewhere"})
    assert load_whisper(whisper, "cpu").model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_timestamps_token_id", 10**6),
        ("no_timestamps_token_id", "x"),
        ("decoder_start_token_id", -1),
        ("eos_token_id", {}),
        ("lang_to_id", [1]),
        ("lang_to_id", {"<|en|>": "two"}),
        ("suppress_tokens", "all"),
        ("suppress_tokens", [10**9]),
        ("alignment_heads", [[-1, 0]]),
        ("alignment_heads", "x"),
        ("max_length", "x"),
        ("max_length", -4),
        ("max_initial_timestamp_index", []),
        ("is_multilingual", "no"),
    ],
)
def test_impossible_generation_settings_are_refused(whisper: Path, name: str, value: Any) -> None:
    change(whisper / "generation_config.json", **{name: value})
    assert_refused(lambda: load_whisper(whisper, "cpu"), f"`{name}` must be .* but the generation config of")


@pytest.mark.parametrize(("name", "value"), [("n_fft", 10**9), ("chunk_length", "x"), ("hop_length", 0)])
def test_enormous_feature_extractors_are_refused(whisper: Path, name: str, value: Any) -> None:
    settings = json.loads((whisper / "processor_config.json").read_text())
    settings["feature_extractor"][name] = value
    (whisper / "processor_config.json").write_text(json.dumps(settings))
    assert_refused(lambda: load_whisper(whisper, "cpu"), f"`{name}` must be a whole number")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heads": None}, "must hold whole heads"),
        ({"heads": {"hidden_size": "x", "vocab_size": 3}}, "must hold whole heads"),
        ({"heads": {"hidden_size": 32, "vocab_size": 400, "heads": 10**9}}, "must hold whole heads"),
        ({"heads": {"hidden_size": 10**7, "vocab_size": 400, "heads": 3}}, "of its config's shapes"),
        ({"heads": {"hidden_size": 32, "vocab_size": 400, "heads": 2}}, "2 unknown tensors in all"),
        ({"heads": {"hidden_size": 32, "vocab_size": 400, "heads": 4}}, "lacks"),
        ({"ranks": [[float("nan")]] * 3}, "not the probabilities"),
        ({"ranks": "abc"}, "not the probabilities"),
    ],
)
def test_damaged_heads_are_refused(whisper: Path, values: dict[str, Any], message: str) -> None:
    change(whisper / "medusa" / "config.json", **values)
    loaded = load_whisper(whisper, "cpu")
    assert_refused(partial(loaded.own_drafter, "medusa"), message)
    assert_refused(lambda: load_heads(whisper / "medusa", loaded.model), message)


def test_heads_of_unknown_systems_are_refused(whisper: Path) -> None:
    """A model's drafter may be of any system, and is told so; `load_heads` reads Medusa's alone."""
    change(whisper / "medusa" / "config.json", system=7)
    loaded = load_whisper(whisper, "cpu")
    assert_refused(
        partial(loaded.own_drafter, "medusa"), "`drafter` must hold a drafter of medusa, .* but '.*medusa' holds '7'"
    )
    assert_refused(
        lambda: load_heads(whisper / "medusa", loaded.model), "must hold Medusa heads, but '.*medusa' holds 7"
    )


def test_heads_cut_short_are_one_error_of_the_call(whisper: Path) -> None:
    file = whisper / "medusa" / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    own = processor()
    assert_refused(partial(load_whisper(whisper, "cpu").own_drafter, "medusa"), "is damaged")
    assert_refused(lambda: load_heads(whisper / "medusa", network(own.tokenizer)), "is damaged")  # type: ignore[attr-defined]
    assert_refused(lambda: load_heads(3, network(own.tokenizer)), "must be a path")  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b'{"system": "daspeech"}'),
        ("units.json", b'{"a": 1}'),
        ("units.json", b"[1, 2]"),
    ],
)
def test_translators_with_damaged_contents_are_refused(
    tiny_model: Path, tmp_path: Path, file: str, content: bytes
) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    (copy / file).write_bytes(content)
    assert_refused(lambda: mmdec.load(copy, "cpu"), "must")


def test_translators_with_contradicting_sizes_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    settings = json.loads((tiny_model / "config.json").read_text())
    for number, (part, name, value) in enumerate(
        (("encoder", "layers", 10**9), ("encoder", "d_model", 10**7), ("dag", "heads", 0), ("dag", "heads", "two"))
    ):
        copy = Path(shutil.copytree(tiny_model, tmp_path / str(number)))
        changed = settings["architecture"] | {part: settings["architecture"][part] | {name: value}}
        change(copy / "config.json", architecture=changed)
        assert_refused(lambda copy=copy: mmdec.load(copy, "cpu"), "must")


def test_checkpoints_that_training_starts_from_are_checked(tmp_path: Path) -> None:
    (tmp_path / "step=1.ckpt").write_bytes(b"PK\x03\x04 cut")
    assert_refused(lambda: read_checkpoint(tmp_path / "step=1.ckpt"), "`checkpoint` must hold whole tensors")
    (tmp_path / "step=1.ckpt").unlink()
    (tmp_path / "tts.json").write_text('{"config": 3, "units": []}')
    assert_refused(lambda: load_acoustic(tmp_path), "lacks 'tts.safetensors'")
    save_file({"a": torch.zeros(1)}, tmp_path / "tts.safetensors")
    assert_refused(lambda: load_acoustic(tmp_path), "`acoustic` must hold its sizes")


def test_upper_bounds_are_not_checked_as_counts() -> None:
    """Qwen's text settings say `max_window_layers` 80, of two layers too."""
    state = {"weight": torch.zeros(1)}
    check_layer_counts({"text_config": {"max_window_layers": 80, "num_hidden_layers": 1}}, state)
    with pytest.raises(mmdec.InputError, match="`num_hidden_layers` is 80 for 1 tensors"):
        check_layer_counts({"text_config": {"max_window_layers": 80, "num_hidden_layers": 80}}, state)


def test_an_index_without_a_weight_map_is_refused(tmp_path: Path) -> None:
    for content in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'):
        (tmp_path / INDEX).write_text(content)
        assert_refused(lambda: weight_files(tmp_path), "must name a file for each tensor")


def test_tensors_of_every_dtype_are_checked(tmp_path: Path) -> None:
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2):
        tensor = torch.ones(5).to(kind)
        save_file({"good": tensor, "none": torch.zeros(0, dtype=kind)}, tmp_path / "x.safetensors")
        assert read_weights([tmp_path / "x.safetensors"])["good"].dtype == kind
        save_file({"bad": torch.tensor([1.0, float("inf")]).to(kind)}, tmp_path / "y.safetensors")
        assert_refused(lambda: read_weights([tmp_path / "y.safetensors"]), "'bad'")


@pytest.mark.parametrize("model", [None, 3, b"x", "a\0b", "x" * 5000, ["x"], "", "a/b/c", torch.zeros(1)])
def test_impossible_model_names_are_refused(model: Any) -> None:
    for load in (mmdec.load, load_whisper):
        assert_refused(lambda load=load: load(model, "cpu"), "`model` must be a shipped name")
