"""Tests augmentation of recordings: shifted resonances at the same pitch, coloured noise, and echo of rooms."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from mmdec.errors import InputError
from mmdec.io.audio import SAMPLE_RATE
from mmdec.training.corpora import augment as sounds
from tests.support.warm_processes import python_output

COUNT = 4 * SAMPLE_RATE
FREQUENCY = np.fft.rfftfreq(COUNT, 1 / SAMPLE_RATE)


class Drawn:
    """A generator of given numbers: a voice's size, a flat microphone or a muffled one."""

    def __init__(self, size: float, muffled: bool = False, gain: float = 0.0) -> None:
        self.size, self.muffled, self.gain = size, muffled, gain

    def uniform(self, low: float, high: float) -> float:
        return low if self.muffled and low > 1 else self.size

    def normal(self, mean: float, deviation: float, size: int) -> np.ndarray:
        return self.gain * deviation * (-1.0) ** np.arange(size)

    def random(self) -> float:
        return 0.0 if self.muffled else 1.0


def voiced(pitch: float, resonance: float) -> np.ndarray:
    """Pulses of a pitch through one resonance."""
    spectrum = np.fft.rfft((np.arange(COUNT) % round(SAMPLE_RATE / pitch) == 0).astype(float))
    spectrum /= np.sqrt((1 - (FREQUENCY / resonance) ** 2) ** 2 + (0.1 * FREQUENCY / resonance) ** 2)
    made = np.fft.irfft(spectrum, COUNT)
    return (made / np.abs(made).max()).astype(np.float32)


def power(sound: np.ndarray) -> np.ndarray:
    return np.abs(np.fft.rfft(sound)) ** 2


def loudest(sound: np.ndarray) -> float:
    """Where a smooth spectrum is highest, Hz."""
    width = 1601  # 400 Hz
    return float(FREQUENCY[np.convolve(power(sound), np.hanning(width), "same").argmax()])


def pitch_of(sound: np.ndarray) -> float:
    result = np.fft.irfft(power(sound))
    lags = np.arange(len(result))
    near = (lags > SAMPLE_RATE // 400) & (lags < SAMPLE_RATE // 80)
    return SAMPLE_RATE / float(lags[near][result[near].argmax()])


def changed(sound: np.ndarray, draw: Any) -> np.ndarray:
    return sounds.perturb_vocal_tract(sound, draw)


@pytest.mark.parametrize("size", [-0.14, 0.0, 0.14])
def test_formants_shift_without_the_pitch(size: float) -> None:
    sound = voiced(125, 2000)
    made = changed(sound, Drawn(size))
    assert made.shape == sound.shape
    assert made.dtype == np.float32
    assert loudest(made) == pytest.approx(2000 / (1 + size), abs=130)
    assert pitch_of(made) == pytest.approx(125, rel=0.02)


def test_nothing_changes_where_nothing_is_drawn() -> None:
    sound = voiced(125, 1500)
    np.testing.assert_allclose(changed(sound, Drawn(0.0))[512:-512], sound[512:-512], atol=1e-4)


def test_a_muffled_microphone_cuts_high_frequencies() -> None:
    sound = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32) * 0.1
    before, after = power(sound), power(changed(sound, Drawn(0.0, muffled=True)))
    edge = sounds.DULLEST
    above, below = edge + 1000 < FREQUENCY, edge - 300 > FREQUENCY
    assert after[above].mean() < 0.02 * before[above].mean()
    assert after[below].mean() == pytest.approx(before[below].mean(), rel=0.1)


def test_the_same_generator_makes_the_same_voice() -> None:
    sound = voiced(150, 900)
    first, again, other = (changed(sound, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (first == again).all()
    assert not np.allclose(first, other, atol=1e-3)
    assert np.isfinite(first).all()


def test_silence_stays_silence() -> None:
    assert np.abs(changed(np.zeros(8000, np.float32), np.random.default_rng(0))).max() < 1e-6


def test_speed_changes_the_length() -> None:
    sound = voiced(100, 1000)
    quick = sounds.speed_perturb(sound, 1.25)
    assert len(quick) == round(len(sound) / 1.25)
    frequency = np.fft.rfftfreq(len(quick), 1 / SAMPLE_RATE)
    assert frequency[np.convolve(power(quick), np.hanning(1601), "same").argmax()] == pytest.approx(1250, abs=60)


def test_a_microphone_colours_the_spectrum() -> None:
    """Gains of 4 dB up and down in turn, at 0, 200, 500, 1000 Hz and so on."""
    sound = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32) * 0.1
    before, after = power(sound), power(changed(sound, Drawn(0.0, gain=1.0)))
    for band, sign in ((1000, -1), (2000, 1), (4000, -1)):
        near = np.abs(FREQUENCY - band) < 60
        assert 10 * np.log10(after[near].mean() / before[near].mean()) == pytest.approx(4.0 * sign, abs=0.6)


def test_noise_has_the_given_spectrum() -> None:
    """The slope of its power lies between none (white) and -6 dB an octave (brown)."""
    slopes = []
    for seed in range(12):
        result = power(sounds.coloured_noise(np.random.default_rng(seed), COUNT))
        low, high = ((at < FREQUENCY) & (2 * at > FREQUENCY) for at in (250, 4000))
        slopes.append(10 * np.log10(result[high].mean() / result[low].mean()) / 4)
    assert -6.3 < min(slopes) < -4.5
    assert -1.5 < max(slopes) < 0.3


def test_a_room_adds_reverberation_that_decays() -> None:
    click = np.zeros(SAMPLE_RATE, np.float32)
    click[1000] = 1.0
    made = sounds.reverberate(click, np.random.default_rng(3))
    assert np.abs(made[:1000]).max() < 1e-6  # nothing before the sound
    assert made[1000] == pytest.approx(1.0, abs=1e-4)
    levels = [float(np.mean(made[1001 + at : 1001 + at + 400] ** 2)) for at in (0, 800, 4000, 8000)]
    assert levels[0] > 1e-5
    assert levels[0] > levels[1] > levels[2] > levels[3]
    assert levels[3] < 1e-3 * levels[0]


ADDED: list[Callable[..., np.ndarray]] = [sounds.add_coloured_noise, sounds.add_babble]
RANDOM = {  # each from a seed alone
    "noise": lambda seed: sounds.add_coloured_noise(voiced(120, 800), 10.0, np.random.default_rng(seed)),
    "noise alone": lambda seed: sounds.coloured_noise(np.random.default_rng(seed), COUNT),
    "babble": lambda seed: sounds.add_babble(voiced(120, 800), 10.0, np.random.default_rng(seed)),
    "room": lambda seed: sounds.reverberate(voiced(120, 800), np.random.default_rng(seed)),
    "speed": lambda seed: sounds.speed_perturb(voiced(120, 800), 1 + seed / 100),
}


@pytest.mark.parametrize("add", ADDED)
@pytest.mark.parametrize("ratio", [5.0, 17.5, 30.0])
def test_the_ratio_of_speech_to_noise_is_the_one_asked_for(add: Callable[..., np.ndarray], ratio: float) -> None:
    sound = np.r_[voiced(120, 800), np.zeros(COUNT, np.float32)]
    for seed in range(4):
        made = add(sound, ratio, np.random.default_rng(seed))
        assert made.shape == sound.shape
        assert made.dtype == np.float32
        added = made.astype(float) - sound
        assert 10 * np.log10(np.mean(sound.astype(float) ** 2) / np.mean(added**2)) == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("add", ADDED)
def test_nothing_is_added_to_silence(add: Callable[..., np.ndarray]) -> None:
    assert not add(np.zeros(8000, np.float32), 10.0, np.random.default_rng(0)).any()


@pytest.mark.parametrize("count", [1, 100, SAMPLE_RATE])
def test_noise_alone_is_bounded(count: int) -> None:
    for seed in range(4):
        made = sounds.coloured_noise(np.random.default_rng(seed), count)
        assert made.shape == (count,)
        assert made.dtype == np.float32
        assert np.abs(made).max() == pytest.approx(1.0)


@pytest.mark.parametrize("name", RANDOM)
def test_results_depend_on_the_seed_alone(name: str) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = RANDOM[name](7)
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert np.array_equal(first, RANDOM[name](7))
    other = RANDOM[name](8)
    assert first.dtype == np.float32
    assert other.shape != first.shape or not np.allclose(first, other, atol=1e-3)


@pytest.mark.parametrize("name", RANDOM)
def test_global_generators_are_left_alone(name: str) -> None:
    before, before_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    RANDOM[name](3)
    assert random.getstate() == before
    after_numpy = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(before_numpy, after_numpy, strict=True))


def test_global_generators_are_put_back_after_an_error() -> None:
    before = random.getstate()
    with pytest.raises(ValueError, match="own"), sounds._global_seed(3):
        raise ValueError("own")
    assert random.getstate() == before


def test_augmentation_is_the_same_in_another_process() -> None:
    code = """
import hashlib
import numpy as np
from mmdec.training.corpora import augment as sounds
sound = np.sin(np.arange(16000, dtype=np.float32) / 9) * np.float32(0.3)
made = sounds.add_coloured_noise(sounds.speed_perturb(sound, 1.07), 12.0, np.random.default_rng(5))
print(hashlib.blake2b(made.tobytes()).hexdigest())
"""
    result = python_output(code).strip()
    sound = np.sin(np.arange(16000, dtype=np.float32) / 9) * np.float32(0.3)
    made = sounds.add_coloured_noise(sounds.speed_perturb(sound, 1.07), 12.0, np.random.default_rng(5))
    assert result == blake2b(made.tobytes()).hexdigest()


@pytest.mark.parametrize("pace", [0.9, 0.97, 1.1])
def test_speed_changes_nothing_but_pitch_and_length(pace: float) -> None:
    """A tone is the tone of another pitch, 60 dB above what else there is (linear interpolation: 13)."""
    time = np.arange(COUNT) / SAMPLE_RATE
    tone = (0.5 * np.sin(2 * np.pi * 4000 * time)).astype(np.float32)
    rate = round(SAMPLE_RATE / pace)
    made = sounds.speed_perturb(tone, pace)
    assert len(made) == pytest.approx(COUNT / pace, rel=1e-4)
    ideal = 0.5 * np.sin(2 * np.pi * 4000 * np.arange(len(made)) / rate)
    assert np.mean((made - ideal)[500:-500] ** 2) < 1e-6 * 0.125


def test_speed_one_and_empty_sound_change_nothing() -> None:
    sound = voiced(100, 1000)
    assert np.array_equal(sounds.speed_perturb(sound, 1.0), sound)
    assert len(sounds.speed_perturb(np.zeros(0, np.float32), 1.1)) == 0


def test_without_the_package_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    sounds._audiomentations.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(sounds, "import_module", absent)
        with pytest.raises(InputError, match=r"audiomentations.*pip install 'mmdec\[train\]'"):
            sounds.speed_perturb(np.zeros(100, np.float32), 1.1)
    sounds._audiomentations.cache_clear()


def test_babble_is_made_of_voices() -> None:
    sound = np.r_[voiced(120, 800), np.zeros(COUNT, np.float32)]
    added = sounds.add_babble(sound, 0.0, np.random.default_rng(0)) - sound
    assert np.mean(added[-COUNT:] ** 2) > 0.1 * np.mean(sound**2)  # in the pause, too
