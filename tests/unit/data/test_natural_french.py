"""Natural French: espeak-ng's phones in Kokoro's alphabet, voices by sentence, a manifest that survives kills."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import yaml

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import kokoro
import natural_french
import sampler

TABLE = yaml.safe_load(natural_french.VOICES.read_text(encoding="utf-8"))
SIGNS = " abdefijklmnopstuvwyzøœɑɔəɛɡɥɲʁʃʒʤʧˈ̃,.!?"


class Network:
    """Stands for the ONNX network: silence, a tone of 60 ms a phone divided by the speed, silence."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def run(self, _: None, inputs: dict) -> list[np.ndarray]:
        self.calls.append(inputs)
        steps = np.arange(int(24_000 * 0.06 * inputs["tokens"].shape[1] / inputs["speed"][0]))
        tone = 0.5 * np.sin(steps * 0.1).astype(np.float32)
        return [np.concatenate([np.zeros(9600, np.float32), tone, np.zeros(4800, np.float32)])]


@pytest.fixture
def voices(tmp_path: Path) -> kokoro.Kokoro:
    folder = tmp_path / "voices"
    folder.mkdir()
    numbers = {sign: number for number, sign in enumerate(SIGNS, 1)}
    (folder / "vocab.json").write_text(json.dumps({"vocab": numbers}), encoding="utf-8")
    names = {TABLE["base"], *TABLE["train"], *(style for voice in TABLE["held_out"] for style in voice)}
    styles = {name: np.full((510, 1, 256), number, np.float32) for number, name in enumerate(sorted(names))}
    np.savez(folder / "voices.npz", **styles)  # type: ignore[arg-type]
    speaking = kokoro.Kokoro(folder)
    speaking.__dict__["network"] = Network()  # the cached session
    return speaking


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kokoro, "espeak_phones", lambda clauses, language="fr-fr": [c.lower() for c in clauses])
    folder = tmp_path / "everyday"
    folder.mkdir()
    for split, words in (("train", "tu manges du pain"), ("dev", "il dort"), ("test", "elle sort")):
        rows = [f"{split}{n:02d}\tg{n}\t{words} {'la ' * (n % 5)}bas.\tSomething.\n" for n in range(20)]
        (folder / f"{split}.tsv").write_text("".join([*rows, f"x\tg\t{words} 23.\tFigures.\n"]), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("phones", "mapped"),
    [
        ("bɔ̃ʒˈuʁ", "bɔ̃ʒˈuʁ"),
        ("lə- (^e^n)wˈiːkˈɛnd(^f^r) d^ʒ", "lə wˈiːkˈɛnd ʤ"),
        ("le-z ɑ̃fˈɑ̃ t^ʃe^ɪ", "lez ɑ̃fˈɑ̃ ʧA"),
        ("(en)kˈuːl(fr) ɡaʁ r", "kˈuːl ɡaʁ ʁ"),
    ],
)
def test_phones_are_mapped_to_the_voices_alphabet(phones: str, mapped: str) -> None:
    assert kokoro.to_alphabet(phones) == mapped


def test_marks_stay_between_the_clauses_phones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kokoro, "espeak_phones", lambda clauses, language="fr-fr": [c.upper() for c in clauses])
    assert kokoro.phones_of('Oui, "toi" (et) moi... viens?!') == "OUI, TOI ET MOI. VIENS?"


def test_held_out_styles_are_in_no_training_voice() -> None:
    held = {style for voice in TABLE["held_out"] for style in voice} - {TABLE["base"]}
    assert held
    assert held.isdisjoint(TABLE["train"])
    assert all(sum(voice.values()) == pytest.approx(1) for voice in TABLE["held_out"])


def test_a_recording_follows_from_its_sentence_and_a_cut_build_goes_on(text: Path, voices: kokoro.Kokoro) -> None:
    planned = natural_french.plan([text], [1.0], 18, {"dev": 1, "test": 1})
    assert [sentence.split for sentence in planned].index("dev") == 9
    assert all("23" not in sentence.french for sentence in planned)
    whole, cut = text.parent / "whole", text.parent / "cut"
    assert natural_french.build(planned, voices, TABLE, whole) == []
    natural_french.build(planned[:7], voices, TABLE, cut)
    manifest = cut / natural_french.MANIFEST
    lines_before = manifest.read_text(encoding="utf-8").rstrip("\n")
    manifest.write_text(lines_before[:-5], encoding="utf-8")  # killed while it wrote the seventh line
    calls = len(voices.network.calls)
    assert natural_french.build(planned, voices, TABLE, cut) == []
    assert len(voices.network.calls) - calls == 20 - 6
    for path in sorted(whole.rglob("*.*")):
        assert path.read_bytes() == (cut / path.relative_to(whole)).read_bytes()
    rows = [line.split("\t") for line in manifest.read_text(encoding="utf-8").splitlines()]
    assert rows[0] == list(natural_french.HEADER)
    speed, seconds = float(rows[1][4]), float(rows[1][5])
    samples, rate = soundfile.read(cut / rows[1][1])
    assert rate == 16_000
    assert seconds == pytest.approx(len(samples) / rate, abs=1e-3)
    phones = voices.network.calls[0]["tokens"].shape[1]
    assert seconds == pytest.approx(0.06 * phones / speed + 0.16, abs=0.03)  # trimmed to 0.08 s at either end


def test_recordings_of_impossible_length_are_named(text: Path, voices: kokoro.Kokoro) -> None:
    planned = natural_french.plan([text], [1.0], 3, {"dev": 0, "test": 0})
    voices.__dict__["network"] = SimpleNamespace(run=lambda *_: [np.zeros(24_000, np.float32)])
    failed = natural_french.build(planned, voices, TABLE, text.parent / "silent")
    assert len(failed) == 3
    assert planned[0].name in failed[0]


def test_styles_are_mixed_by_their_shares(voices: kokoro.Kokoro) -> None:
    first, second = list(voices.styles)[:2]
    mixed = voices.style({first: 0.25, second: 0.75}, 7)
    assert mixed.shape == (1, 256)
    assert mixed[0] == pytest.approx(0.25 * voices.styles[first][7] + 0.75 * voices.styles[second][7])


def test_shares_hold_for_as_long_as_each_list_lasts() -> None:
    many = [natural_french.Sentence(f"a{n}", "train", "x") for n in range(85)]
    few = [natural_french.Sentence(f"b{n}", "train", "y") for n in range(5)]
    order = list(natural_french.interleaved([many, few], [0.85, 0.15]))
    assert len(order) == 90
    assert sum(s.name.startswith("b") for s in order[:20]) == 3


def test_no_sentence_is_read_for_training_that_another_folder_holds_back(text: Path) -> None:
    other = text.parent / "other"
    other.mkdir()
    for split, line in (("train", "Merci beaucoup."), ("dev", "Tu manges du pain bas !"), ("test", "Elle part.")):
        (other / f"{split}.tsv").write_text(f"1\tg\t{line}\tSomething.\n", encoding="utf-8")
    planned = natural_french.plan([text, other], [1.0, 1.0], 30, {"dev": 0, "test": 0})
    assert "Merci beaucoup." in {sentence.french for sentence in planned}
    assert "tu manges du pain bas." not in {sentence.french for sentence in planned}


def test_samples_are_test_sentences_in_held_out_voices(text: Path, voices: kokoro.Kokoro, tmp_path: Path) -> None:
    out, style = tmp_path / "samples", next(s for s in TABLE["held_out"][0] if s != TABLE["base"])
    (text / "test.tsv").write_text("1\tg\tElle sort ?\tShe leaves.\tIs she leaving?\n", encoding="utf-8")
    sampler.write_samples(out, [sampler.Sample("sort", "Elle sort ?", style)], [text], voices)
    assert (out / "samples.tsv").read_text(encoding="utf-8") == "sort.wav\tElle sort ?\tShe leaves.\tIs she leaving?\n"
    sound = soundfile.info(out / "sort.wav")
    assert (sound.samplerate, sound.channels, sound.subtype) == (16_000, 1, "PCM_16")
    for french, voice, expected in (
        ("Il dort.", style, "must hold test sentences"),
        ("Elle sort ?", next(iter(TABLE["train"])), "held-out"),
        ("Elle sort ?", TABLE["base"], "held-out"),
    ):
        with pytest.raises(ValueError, match=expected):
            sampler.write_samples(out, [sampler.Sample("x", french, voice)], [text], voices)
