"""What training does to recordings: resonances move and the pitch stays, noise has its colour, rooms their echo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmdec.audio import SAMPLE_RATE
from mmdec.training import sounds

COUNT = 4 * SAMPLE_RATE
FREQUENCY = np.fft.rfftfreq(COUNT, 1 / SAMPLE_RATE)


class Drawn:
    """A generator of given numbers: a voice's size, a flat microphone or a muffled one."""

    def __init__(self, size: float, muffled: bool = False) -> None:
        self.size, self.muffled = size, muffled

    def uniform(self, low: float, high: float) -> float:
        return low if self.muffled and low > 1 else self.size

    def normal(self, mean: float, deviation: float, size: int) -> np.ndarray:
        return np.zeros(size)

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
    return sounds.another_voice(sound, draw)


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
    quick = sounds.faster(sound, 1.25)
    assert len(quick) == round(len(sound) / 1.25)
    frequency = np.fft.rfftfreq(len(quick), 1 / SAMPLE_RATE)
    assert frequency[np.convolve(power(quick), np.hanning(1601), "same").argmax()] == pytest.approx(1250, abs=60)
