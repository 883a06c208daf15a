"""What training does to recordings: resonances move and the pitch stays, noise has its colour, rooms their echo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmdec.audio import SAMPLE_RATE
from mmdec.training.whisper import augment as sounds

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
    found = np.fft.irfft(power(sound))
    lags = np.arange(len(found))
    near = (lags > SAMPLE_RATE // 400) & (lags < SAMPLE_RATE // 80)
    return SAMPLE_RATE / float(lags[near][found[near].argmax()])


def changed(sound: np.ndarray, draw: Any) -> np.ndarray:
    return sounds.perturb_vocal_tract(sound, draw)


@pytest.mark.parametrize("size", [-0.14, 0.0, 0.14])
def test_a_mouth_of_another_size_at_the_same_pitch(size: float) -> None:
    sound = voiced(125, 2000)
    made = changed(sound, Drawn(size))
    assert made.shape == sound.shape
    assert made.dtype == np.float32
    assert loudest(made) == pytest.approx(2000 / (1 + size), abs=130)
    assert pitch_of(made) == pytest.approx(125, rel=0.02)


def test_nothing_changes_where_nothing_is_drawn() -> None:
    sound = voiced(125, 1500)
    np.testing.assert_allclose(changed(sound, Drawn(0.0))[512:-512], sound[512:-512], atol=1e-4)


def test_a_muffled_microphone_hears_nothing_above_its_edge() -> None:
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


def test_pace() -> None:
    sound = voiced(100, 1000)
    quick = sounds.speed_perturb(sound, 1.25)
    assert len(quick) == round(len(sound) / 1.25)
    frequency = np.fft.rfftfreq(len(quick), 1 / SAMPLE_RATE)
    assert frequency[np.convolve(power(quick), np.hanning(1601), "same").argmax()] == pytest.approx(1250, abs=60)


def test_a_microphone_is_uneven() -> None:
    """Gains of 4 dB up and down in turn, at 0, 200, 500, 1000 Hz and so on."""
    sound = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32) * 0.1
    before, after = power(sound), power(changed(sound, Drawn(0.0, gain=1.0)))
    for band, sign in ((1000, -1), (2000, 1), (4000, -1)):
        near = np.abs(FREQUENCY - band) < 60
        assert 10 * np.log10(after[near].mean() / before[near].mean()) == pytest.approx(4.0 * sign, abs=0.6)


def test_noise_has_a_colour() -> None:
    """The slope of its power lies between none (white) and -6 dB an octave (brown)."""
    slopes = []
    for seed in range(12):
        found = power(sounds.coloured_noise(np.random.default_rng(seed), COUNT))
        low, high = ((at < FREQUENCY) & (2 * at > FREQUENCY) for at in (250, 4000))
        slopes.append(10 * np.log10(found[high].mean() / found[low].mean()) / 4)
    assert -6.3 < min(slopes) < -4.5
    assert -1.5 < max(slopes) < 0.3


def test_a_room_answers_and_falls_silent() -> None:
    click = np.zeros(SAMPLE_RATE, np.float32)
    click[1000] = 1.0
    made = sounds.reverberate(click, np.random.default_rng(3))
    assert np.abs(made[:1000]).max() < 1e-6  # nothing before the sound
    assert made[1000] == pytest.approx(1.0, abs=1e-4)
    levels = [float(np.mean(made[1001 + at : 1001 + at + 400] ** 2)) for at in (0, 800, 4000, 8000)]
    assert levels[0] > 1e-5
    assert levels[0] > levels[1] > levels[2] > levels[3]
    assert levels[3] < 1e-3 * levels[0]


def test_voices_murmur() -> None:
    sound = np.r_[voiced(120, 800), np.zeros(COUNT, np.float32)]
    made = sounds.babble_noise(sound, np.random.default_rng(0))
    assert made.shape == sound.shape
    assert np.sum(made**2) == pytest.approx(4 * np.sum(sound**2), rel=0.5)
