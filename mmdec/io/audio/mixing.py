"""Mixes channels down to one. Channels of opposite phase, which would cancel each other, are inverted first."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import final

import numpy as np
from torch import Tensor

from mmdec.io.audio.samples import SILENCE

BLOCK_SECONDS = 0.05  # seconds of sound for which one decision is made
FADE_SECONDS = 0.01  # seconds in which a channel is inverted, so that nothing clicks
# The mix of a block has lost sound if its energy is below this share of the energy of the mix with the best signs. The
# mean of two equal channels loses that much if their correlation is below -0.74.
LOST_ENERGY_SHARE = 0.15
FAINT_ENERGY_SHARE = 1e-4  # share of the energy of the loudest block so far; the note ignores blocks with less
MIN_NOTED_SECONDS = 0.2  # minimum seconds of inverted sound that are worth a note
MAX_CHANNELS = 32  # more channels are averaged as they are


@final
class Mixer:
    """Mixes a recording's channels down to one, block by block: the mean, with such signs that nothing cancels.

    As long as the channels do not cancel each other, the signs stay as they are, at first all positive. Blocks are
    counted from the beginning of the recording, so that the mix does not depend on how the recording is divided.

    Args:
        rate: The sample rate in Hz.
    """

    def __init__(self, rate: int) -> None:
        self._size, self._fade = max(round(BLOCK_SECONDS * rate), 1), max(round(FADE_SECONDS * rate), 1)
        self._rate = rate
        self._rest: np.ndarray | None = None  # the last samples, which do not fill a block yet
        self._signs: np.ndarray | None = None  # (channels,), 1 or -1
        self._low = self._high = np.zeros(0)  # extremes of each channel
        self._loudest, self._inverted, self._samples = 0.0, 0, 0

    def add(self, channels: np.ndarray) -> np.ndarray:
        """Mix the next samples (T, channels).

        Returns:
            The samples (N,) of all blocks that are full now.
        """
        count = channels.shape[1]
        if count == 1:
            return channels[:, 0]
        self._measure(channels)
        if count > MAX_CHANNELS:
            return channels.mean(axis=1)
        whole = channels if self._rest is None or not len(self._rest) else np.concatenate([self._rest, channels])
        used = len(whole) - len(whole) % self._size
        self._rest = whole[used:].copy()
        return self._mix(whole[:used])

    def end(self) -> np.ndarray:
        """Return the samples (N,) that remain."""
        rest, self._rest = self._rest, None
        return np.zeros(0, np.float32) if rest is None else self._mix(rest)

    def audible(self, mixed: Tensor) -> Tensor:
        """Return the mix (T,), or the mix at the loudest channel's level if it would be taken for silence.

        The mean of one voice and seven dead channels is 18 dB below the voice.
        """
        loudest = float((self._high - self._low).max(initial=0.0)) / 2
        peak = float(mixed.max() - mixed.min()) / 2 if len(mixed) else 0.0
        return mixed * (loudest / peak) if 0 < peak < SILENCE and loudest > peak else mixed

    @property
    def note(self) -> str:
        """A sentence about channels that were inverted; "" if there were none."""
        if self._inverted < MIN_NOTED_SECONDS * self._rate:
            return ""
        inverted, seconds = self._inverted / self._rate, self._samples / self._rate
        return (
            f"the channels are opposite and cancel each other for {inverted:.1f} of {seconds:.1f} s, so some were "
            "inverted before they were mixed"
        )

    def _measure(self, channels: np.ndarray) -> None:
        if len(channels):
            low, high = channels.min(axis=0), channels.max(axis=0)
            self._low = low if not self._samples else np.minimum(self._low, low)
            self._high = high if not self._samples else np.maximum(self._high, high)
            self._samples += len(channels)

    def _mix(self, channels: np.ndarray) -> np.ndarray:
        """Mix whole blocks (T, channels); a single block may be shorter."""
        if not len(channels):
            return np.zeros(0, channels.dtype)
        blocks = channels.reshape(-1, min(self._size, len(channels)), channels.shape[1])
        first = not self._loudest  # no earlier sound that could click
        before = np.ones(channels.shape[1], channels.dtype) if self._signs is None else self._signs
        signs = self._signs_of(blocks, before)  # (blocks, channels)
        self._signs = signs[-1]
        with np.errstate(all="ignore"):  # infinite samples are found by a check of the caller
            if (signs > 0).all() and (before > 0).all():
                return channels.mean(axis=1)
            previous = np.concatenate([signs[:1] if first else before[None], signs[:-1]])
            ramp = np.ones(blocks.shape[1], channels.dtype)
            fade = min(self._fade, len(ramp))
            ramp[:fade] = np.linspace(0.0, 1.0, fade)
            gains = previous[:, None] + (signs - previous)[:, None] * ramp[:, None]
            return (blocks * gains).mean(axis=2).reshape(-1)

    def _signs_of(self, blocks: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """Return the signs (N, channels) for each block.

        Args:
            blocks: (N, samples, channels).
            signs: (channels,), those of the block before.
        """
        with np.errstate(all="ignore"):  # infinite samples are found by a check of the caller
            lines = blocks.transpose(2, 0, 1).copy()  # (channels, N, samples)
            lines -= lines.mean(axis=2, keepdims=True)
            shared = np.empty((len(blocks), len(lines), len(lines)))  # (N, channels, channels), scalar products
            for left, right in combinations_with_replacement(range(len(lines)), 2):
                shared[:, left, right] = shared[:, right, left] = np.einsum("nt,nt->n", lines[left], lines[right])
            energies = np.diagonal(shared, axis1=1, axis2=2)
            # the energies if all channels were equal but for signs and levels
            max_energies = np.sqrt(energies).sum(axis=1) ** 2
            chosen = np.empty((len(blocks), len(signs)), blocks.dtype)
            start = 0
            while start < len(blocks):
                chosen[start:] = signs
                lost = np.flatnonzero(_energy(shared[start:], signs) < LOST_ENERGY_SHARE * max_energies[start:])
                if not len(lost):
                    break
                start += int(lost[0])
                best = _best_signs(shared[start], signs)
                if _energy(shared[start], signs) < LOST_ENERGY_SHARE * _energy(shared[start], best):
                    signs = chosen[start] = best
                    if not self._loudest and not energies[:start].any():  # silence so far
                        chosen[:start] = best
                start += 1
            loud = energies.sum(axis=1) / blocks.shape[1]
            self._loudest = max(self._loudest, float(np.nan_to_num(loud).max()))
            correlations = np.einsum("ncd,nc,nd->n", shared, chosen, chosen)
            inverted = (loud > FAINT_ENERGY_SHARE * self._loudest) & (
                _energy(shared, np.ones(len(signs))) < LOST_ENERGY_SHARE * correlations
            )
            self._inverted += int(inverted.sum()) * blocks.shape[1]
        return chosen


def _energy(shared: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return the energy of the sum of channels with these signs.

    Args:
        shared: (..., channels, channels).
    """
    return shared @ signs @ signs


def _best_signs(shared: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return signs (channels,) with which channels add up instead of cancelling each other.

    Channels are added from the loudest to the quietest, each with the sign that agrees with the sum so far. The first
    channel of those that are about as loud as the loudest keeps its sign, so that rounding does not turn the mix over.

    Args:
        shared: (channels, channels), scalar products of the channels.
        signs: The present ones.
    """
    energies = np.diag(shared)
    first = int(np.argmax(energies >= 0.5 * energies.max()))
    others = [channel for channel in np.argsort(-energies, kind="stable") if channel != first]
    best = np.zeros_like(signs)
    best[first] = signs[first]
    for channel in others:
        together = float(best @ shared[channel])
        best[channel] = signs[channel] if not together else np.sign(together)
    return best


def mix(channels: np.ndarray, rate: int) -> tuple[np.ndarray, Mixer]:
    """Mix a whole recording (T, channels) down.

    Returns:
        The samples (T,), and the mixer that made them.
    """
    mixer = Mixer(rate)
    return np.concatenate([mixer.add(channels), mixer.end()]), mixer
