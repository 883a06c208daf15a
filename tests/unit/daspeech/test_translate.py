"""Tests `translate_speech`, its batches and long recordings, and models' folders."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import mmdec
from mmdec.checks.devices import check_device
from mmdec.checks.weights import PICKLE_SUFFIXES
from mmdec.daspeech import checkpoint
from mmdec.daspeech.options import DASPEECH_KIND, DEFAULT_TRANSLATOR, STRATEGIES
from mmdec.daspeech.passes import Pass
from mmdec.daspeech.translator import RERANKED_TEXTS, STAGES, SpeechTranslator
from mmdec.daspeech.units import BOS, EOS, NUM_SPECIAL_UNITS, PAD
from mmdec.hub.find import HUB_FILES, shipped_names
from tests.conftest import RATE, buzz
from tests.support.grid import slow_but
from tests.support.naive_dag import best_tokens, greedy_path, viterbi_path


def same(a: mmdec.Translation, b: mmdec.Translation) -> bool:
    return a.text == b.text and a.units == b.units and np.array_equal(a.audio, b.audio)


def naive_units(translator: SpeechTranslator, samples: torch.Tensor, strategy: str) -> list[int]:
    """Return the ids that a strategy chooses, one step after another.

    Only the beam search is the library's, which its own tests compare with all texts.
    """
    model, decoding = translator.model, translator.decoding
    source = translator.layout.source(translator.layout.features([samples]))

    def logprobs(units: list[int]) -> torch.Tensor:
        tokens = torch.tensor([[BOS, *units]])
        return model.autoregressive(tokens, source.states, source.lengths)[0].log_softmax(-1)

    if strategy in ("autoregressive", "verified"):
        units = list[int]()
        while len(units) < source.limits[0] and (best := int(logprobs(units)[-1].argmax())) not in (EOS, PAD):
            units.append(best)
        return units
    lattice = model.lattice(source.states, source.lengths, source.sizes)
    if strategy in ("beam", "reranked"):
        paths = lattice.beam(model.english_ngram, decoding.collapse, RERANKED_TEXTS if strategy == "reranked" else 1)
        assert paths.beams is not None
        texts = [[token for token in row if token >= NUM_SPECIAL_UNITS] for row in paths.tokens.tolist()]
        if strategy == "beam":
            return texts[0]
        worth = [
            score + float(logprobs(text).gather(1, torch.tensor([*text, EOS])[:, None]).sum())
            for text, score in zip(texts, paths.beams.tolist(), strict=True)
        ]
        return texts[worth.index(max(worth))]
    tokens, gains = best_tokens(lattice.emissions[0])
    if strategy in ("greedy", "lookahead"):
        path = greedy_path(lattice.links[0], gains, decoding.lookahead_weight if strategy == "lookahead" else 0.0)
    else:
        gains = gains if strategy == "joint-viterbi" else [0.0] * len(gains)
        path = viterbi_path(lattice.links[0], gains, decoding.length_penalty)
    units = [tokens[vertex] for vertex in path]
    if decoding.collapse:
        units = [unit for unit, _ in groupby(units)]
    return [unit for unit in units if unit >= NUM_SPECIAL_UNITS]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_units_of_a_naive_decoder(any_model: Path, strategy: str) -> None:
    translator = mmdec.load(any_model, "cpu")
    assert isinstance(translator, SpeechTranslator)
    for seconds in (0.5, 1.1):
        sound = buzz(seconds, 3)
        out = mmdec.translate_speech(sound, sample_rate=RATE, model=translator, strategy=strategy)
        with torch.inference_mode():
            expected = naive_units(translator, torch.from_numpy(sound), strategy)
        assert out.units == [translator.units[unit] for unit in expected]
        assert len(expected) > 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_answers(any_model: Path, strategy: str, tmp_path: Path) -> None:
    out = mmdec.translate_speech(buzz(2.0), sample_rate=RATE, model=any_model, strategy=strategy, device="cpu")
    assert isinstance(out.text, str)
    assert out.sample_rate == RATE
    assert out.audio.dtype == np.float32
    assert np.abs(out.audio).max() <= 1
    assert tuple(out.timings) == STAGES
    assert out.source_seconds == 2.0
    assert not {"<s>", "</s>", "<pad>", "<unk>"} & set(out.units)
    path = out.save(tmp_path / "x.wav")
    back, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE
    assert np.allclose(back, out.audio, atol=1e-4)


def test_a_translation_survives_json(any_model: Path) -> None:
    out = mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=any_model, device="cpu")
    fields = json.loads(json.dumps(out.to_dict()))
    assert fields.keys() == {
        "text",
        "sample_rate",
        "units",
        "timings",
        "source_seconds",
        "passes",
        "confidence",
        "note",
    }
    assert all(fields[name] == getattr(out, name) for name in fields)


@pytest.mark.parametrize("strategy", slow_but(STRATEGIES, ("lookahead", "autoregressive", "verified", "reranked")))
def test_passes_are_reported(any_model: Path, strategy: str) -> None:
    passes: list[Pass] = []
    options = {"sample_rate": RATE, "model": any_model, "strategy": strategy, "device": "cpu"}
    plain = mmdec.translate_speech(buzz(2.0), **options)
    out = mmdec.translate_speech(buzz(2.0), on_pass=passes.append, **options)
    assert same(plain, out)
    assert [unit for pass_ in passes for unit in pass_.units] == out.units
    assert [pass_.seconds for pass_ in passes] == sorted(pass_.seconds for pass_ in passes)
    graphs = [pass_.graph for pass_ in passes if pass_.graph is not None]
    assert len(graphs) == (strategy != "autoregressive")
    beside = (strategy == "verified") - (strategy == "reranked")  # the graph's own; the judge's, which makes no units
    assert len(passes) == out.passes + beside
    assert out.units_per_pass == len(out.units) / out.passes
    for graph in graphs:
        size = len(graph.links)
        assert graph.links.shape == (size, size)
        assert graph.emissions.shape == (size, len(graph.units))
        assert len(graph.path) == len(graph.chosen)
        assert (graph.path[:1], graph.path[-1:]) == (([], []) if strategy == "verified" else ([0], [size - 1]))


def test_an_exception_of_a_listener_ends_the_translation(any_model: Path) -> None:
    def broken(pass_: Pass) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=any_model, on_pass=broken)
    with pytest.raises(mmdec.InputError, match="`on_pass` must be left out for a list"):
        mmdec.translate_speech([buzz(1.0)], sample_rate=RATE, model=any_model, on_pass=broken)


def test_paths_file_objects_and_arrays_agree(any_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, buzz(1.5), RATE, subtype="FLOAT")
    first = mmdec.translate_speech(path, model=any_model, device="cpu")
    for audio in (str(path), io.BytesIO(path.read_bytes())):
        assert same(first, mmdec.translate_speech(audio, model=any_model, device="cpu"))
    for array in (buzz(1.5), torch.from_numpy(buzz(1.5))):
        assert same(first, mmdec.translate_speech(array, sample_rate=RATE, model=any_model, device="cpu"))
    with path.open("rb") as file:
        assert same(first, mmdec.translate_speech(file, model=any_model, device="cpu"))


@pytest.mark.parametrize("strategy", ["lookahead", "autoregressive"])
def test_a_batch_equals_one_by_one(any_model: Path, strategy: str) -> None:
    batch = [buzz(seconds, seed) for seed, seconds in enumerate((2.0, 0.7, 3.1))]
    together = mmdec.translate_speech(batch, sample_rate=RATE, model=any_model, strategy=strategy, device="cpu")
    assert isinstance(together, list)
    for audio, result in zip(batch, together, strict=True):
        single = mmdec.translate_speech(audio, sample_rate=RATE, model=any_model, strategy=strategy, device="cpu")
        assert same(result, single)
    assert mmdec.translate_speech([], model=any_model) == []


def test_padded_rows_agree_with_rows_alone(any_model: Path) -> None:
    """A GPU decodes one padded batch. Units agree exactly, sounds but for rounding and the last window."""
    translator = mmdec.load(any_model, "cpu")
    sounds = [torch.from_numpy(buzz(seconds, seed)) for seed, seconds in enumerate((2.0, 0.7, 3.1))]
    for strategy in ("lookahead", "autoregressive"):
        padded = translator.translate_batch(sounds, strategy)
        for row, sound in zip(padded, sounds, strict=True):
            (single,) = translator.translate([sound], strategy)
            assert row.units == single.units
            assert row.text == single.text
            assert row.samples.shape == single.samples.shape
            difference = (row.samples - single.samples)[:-1024].square().mean().sqrt()
            assert difference < 0.02 * single.samples.square().mean().sqrt()


def test_one_bad_recording_does_not_lose_the_others(any_model: Path) -> None:
    batch = [buzz(1.0), np.zeros(RATE), buzz(1.5)]
    with pytest.raises(
        mmdec.BatchError, match=r"1 of 3 recordings were rejected, the first at index 1: .*silent"
    ) as caught:
        mmdec.translate_speech(batch, sample_rate=RATE, model=any_model, device="cpu")
    good = [result for result in caught.value.results if result is not None]
    assert [result is None for result in caught.value.results] == [False, True, False]
    assert same(good[1], mmdec.translate_speech(batch[2], sample_rate=RATE, model=any_model, device="cpu"))


def test_a_long_recording_is_cut_and_joined(any_model: Path) -> None:
    parts = [buzz(2.0, seed) for seed in range(3)]
    gap = np.zeros(RATE, dtype=np.float32)
    whole = np.concatenate([parts[0], gap, parts[1], gap, parts[2]])
    out = mmdec.translate_speech(whole, sample_rate=RATE, model=any_model, device="cpu")
    each = mmdec.translate_speech(parts, sample_rate=RATE, model=any_model, device="cpu")
    assert out.source_seconds == 8.0
    assert len(out.units) > max(len(part.units) for part in each)
    assert len(out.text.split()) > max(len(part.text.split()) for part in each)


def test_a_recording_of_ten_minutes_is_translated(tiny_model: Path) -> None:
    sound = np.tile(np.concatenate([buzz(5.0), np.zeros(4 * RATE, dtype=np.float32)]), 67)[: 600 * RATE]
    out = mmdec.translate_speech(sound, sample_rate=RATE, model=tiny_model, device="cpu")
    assert out.source_seconds == 600.0
    assert len(out.audio) > 66 * RATE // 4


def test_stereo_at_another_rate_is_translated(any_model: Path) -> None:
    sound = np.repeat((buzz(1.5, rate=48_000) * 32767).astype(np.int16)[:, None], 2, axis=1)
    assert mmdec.translate_speech(sound, sample_rate=48_000, model=any_model, device="cpu").source_seconds == 1.5


def test_threads_are_given_back(tiny_model: Path) -> None:
    before = torch.get_num_threads()
    mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=tiny_model, threads=before + 1, device="cpu")
    assert torch.get_num_threads() == before
    with pytest.raises(mmdec.InputError, match=r"`threads` must be a whole number from 1 to .*, but is 0"):
        mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=tiny_model, threads=0)


def test_wrong_choices_are_refused_with_the_right_ones(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(mmdec.InputError, match=r"`strategy` must be one of lookahead, .*, but is 'fast'"):
        mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=tiny_model, strategy="fast")
    with pytest.raises(mmdec.InputError, match="`device` must be 'cpu' or 'cuda', but is 'warp'"):
        mmdec.load(tiny_model, "warp")
    with pytest.raises(mmdec.InputError, match=r"`model` must be a shipped name .* but is 'no-such-model'"):
        mmdec.load("no-such-model")
    with pytest.raises(mmdec.InputError, match=r"lacks config\.json"):
        mmdec.load(tmp_path)


def test_arguments_without_effect_are_refused(any_model: Path, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", buzz(1.0), RATE)
    with pytest.raises(mmdec.InputError, match="`sample_rate` must be left out for files"):
        mmdec.translate_speech(tmp_path / "x.wav", sample_rate=8000, model=any_model)
    loaded = mmdec.load(any_model, "cpu")
    with pytest.raises(mmdec.InputError, match="`device` must"):
        mmdec.translate_speech(tmp_path / "x.wav", model=loaded, device="cuda")


def test_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(mmdec.InputError, match=r"must hold safetensors, but is the pickle 'weights\.pt'"):
        mmdec.load("weights.pt")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(mmdec.InputError, match=r"holds a pickle, pytorch_model\.bin"):
        mmdec.load(tmp_path)


@pytest.mark.parametrize(
    "damage", ["config.json", "units.json", "encoder.safetensors", "model.safetensors", "vocoder.safetensors"]
)
def test_damaged_models_are_named(tiny_model: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        (copy / file.name).write_bytes(content[: len(content) // 2] if file.name == damage else content)
    with pytest.raises(mmdec.InputError, match="is damaged or of another version"):
        mmdec.load(copy, "cpu")


def test_weights_of_another_shape_are_named(tiny_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    units = json.loads((copy / "units.json").read_text())
    (copy / "units.json").write_text(json.dumps([*units, "extra"]))
    with pytest.raises(mmdec.InputError, match=r"'ar.embed_tokens.weight' in .* is \(12, 16\) and not \(13, 16\)"):
        mmdec.load(copy, "cpu")


def test_a_model_is_loaded_once(any_model: Path) -> None:
    assert mmdec.load(any_model, "cpu") is mmdec.load(str(any_model), "cpu")


def test_published_vocoders_are_loaded_anew_when_they_change(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    sizes = {"upsample_initial_channel": 16, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
    for seed in range(2):
        torch.manual_seed(seed)
        SpeechT5HifiGan(SpeechT5HifiGanConfig(**sizes)).save_pretrained(tmp_path / "gan")
        loaded = mmdec.load(tiny_model, "cpu", vocoder=tmp_path / "gan")
        again = mmdec.load(tiny_model, "cpu", vocoder=str(tmp_path / "gan"))
        assert loaded is again
        assert loaded is not mmdec.load(tiny_model, "cpu")
        out = mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=loaded)
        own = mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=tiny_model, device="cpu")
        assert (out.text, out.units) == (own.text, own.units)
        assert np.isfinite(out.audio).all()
        assert not np.array_equal(out.audio, own.audio)
        assert torch.equal(
            loaded.vocoder.generator.conv_post.bias,
            SpeechT5HifiGan.from_pretrained(tmp_path / "gan").conv_post.bias,
        )
    with pytest.raises(mmdec.InputError, match="`vocoder` must be left out with a loaded `model`"):
        mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=loaded, vocoder=tmp_path / "gan")
    with pytest.raises(mmdec.InputError, match="`vocoder` must be a folder or Hugging Face id"):
        mmdec.load(tiny_model, "cpu", vocoder="griffin-lim")
    SpeechT5HifiGan(SpeechT5HifiGanConfig(**sizes, sampling_rate=24_000)).save_pretrained(tmp_path / "other")
    with pytest.raises(mmdec.InputError, match="must speak at 16000 Hz"):
        mmdec.load(tiny_model, "cpu", vocoder=tmp_path / "other")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(mmdec.InputError, match="is 'cuda:9' and the last GPU is cuda:1"):
        check_device("cuda:9")


def test_a_card_is_not_kept_for_other_weights(tiny_model: Path, tmp_path: Path) -> None:
    translator = mmdec.load(tiny_model, "cpu")
    target = tmp_path / "again"
    rest = (translator.vocoder, translator.units)
    checkpoint.save_model(target, translator.model, *rest)
    (target / "README.md").write_text("# card\n")
    checkpoint.save_model(target, translator.model, *rest)
    assert (target / "README.md").read_text() == "# card\n"  # the same weights
    other = copy.deepcopy(translator.model)
    with torch.no_grad():
        other.decoder.embed_tokens.weight.mul_(2.0)
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(mmdec.InputError, match=r"no card of other weights.*delete its README.md"):
        checkpoint.save_model(target, other, *rest)
    assert (target / "model.safetensors").read_bytes() == before
    assert (target / "README.md").read_text() == "# card\n"
    (target / "README.md").unlink()
    checkpoint.save_model(target, other, *rest)
    assert (target / "model.safetensors").read_bytes() != before


def test_saving_again_keeps_the_card_and_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    translator = mmdec.load(tiny_model, "cpu")
    target = tmp_path / "again"
    parts = (translator.model, translator.vocoder, translator.units)
    checkpoint.save_model(target, *parts)
    (target / "README.md").write_text("# card\n")
    checkpoint.save_model(target, *parts, provenance={"split": "test"})
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    assert (target / "README.md").read_text() == "# card\n"
    provenance = json.loads((target / "provenance.json").read_text())
    assert provenance["split"] == "test"
    assert {"argv", "commit", "versions", "date"} <= provenance.keys()
    assert not any(argument.startswith("/") for argument in provenance["argv"])
    sound = buzz(1.0)
    first = mmdec.translate_speech(sound, sample_rate=RATE, model=tiny_model, device="cpu")
    assert same(first, mmdec.translate_speech(sound, sample_rate=RATE, model=target, device="cpu"))


def test_a_failed_save_leaves_the_old_model(tiny_model: Path, tmp_path: Path) -> None:
    translator = mmdec.load(tiny_model, "cpu")
    target = tmp_path / "kept"
    parts = (translator.model, translator.vocoder, translator.units)
    checkpoint.save_model(target, *parts)
    before = (target / "model.safetensors").read_bytes()
    weight = translator.model.adaptor.fc1.weight
    weight_before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[0, 0] = 1e6  # beyond half precision
        with pytest.raises(mmdec.MmdecError, match="must fit half precision"):
            checkpoint.save_model(target, *parts)
    finally:
        with torch.no_grad():
            weight.copy_(weight_before)
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_hub_ids_are_fetched_without_pickles(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    import huggingface_hub

    asked: dict[str, object] = {}

    def fetch(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        return str(tiny_model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert checkpoint.resolve("someone/daspeech@v1") == tiny_model
    assert (asked["repository"], asked["revision"]) == ("someone/daspeech", "v1")
    assert not any(pattern.endswith(PICKLE_SUFFIXES) for pattern in HUB_FILES)


def test_shipped_models_are_complete_and_translate_the_samples() -> None:
    samples = sorted((Path(__file__).parents[3] / "data" / "samples").glob("*.wav"))
    assert DEFAULT_TRANSLATOR in shipped_names(DASPEECH_KIND)
    for name in shipped_names(DASPEECH_KIND):
        directory = checkpoint.resolve(name)
        files = {path.name: path.stat().st_size for path in directory.iterdir()}
        assert {"README.md", "provenance.json"} <= files.keys()
        assert not any(file.endswith(PICKLE_SUFFIXES) for file in files)
        assert sum(files.values()) <= 45e6
        assert max(files.values()) <= 25e6
        for out in mmdec.translate_speech(samples[:2], model=name, device="cpu"):
            assert out.text
            assert len(out.audio) > 0.3 * RATE


def test_importing_mmdec_imports_no_torch() -> None:
    code = "import mmdec, sys; dir(mmdec); sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'translate_text'"):
        mmdec.translate_text  # noqa: B018
