"""Reads audio that arrives in chunks: resamples it, detects speech, and cuts it into windows at pauses.

The audio is processed in blocks of 0.1 s, counted from the stream's beginning. So the cuts do not depend on how the
audio is divided into chunks. The memory is limited to one window and the levels of the last ten seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

import numpy as np
import soxr
import torch
from torch import Tensor

from mmdec.io.audio.samples import SAMPLE_RATE, STEP_SAMPLES

FRAMES = 10  # number of 10 ms frames in a block
BLOCK = FRAMES * STEP_SAMPLES  # number of samples in a block (0.1 s)
HISTORY = 100  # number of the newest blocks (10 s) from which the levels of loud speech and of noise are estimated
SILENCE_LEVEL = 3e-4  # RMS level, 1 is full scale (this is -70 dB): a frame with a lower level is silence
# Used until a frame reaches `SILENCE_LEVEL`; one step of 16 bits. A quiet recording is judged by its own noise.
QUIET_SILENCE_LEVEL = 3e-5
OFF_LEVEL = 1e-6  # RMS level of a microphone that is off; it must not lower the estimate of the noise
BELOW_LOUD = 10 ** (-35 / 20)  # a voiced frame's minimum RMS level, as a factor on the level of loud frames: -35 dB
ABOVE_NOISE = 2.5  # a voiced frame's minimum RMS level, as a factor on the level of the noise
NOISE_BLOCKS = 10  # number of blocks (1 s) after which the estimate of the noise level is used
MIN_VOICED_FRAMES = 3  # a block counts as voiced if at least this many of its 10 frames are voiced
LEAD, TAIL = 3, 4  # number of blocks of silence that a window includes before its first and after its last voiced block
LONG_SILENCE = 8.0  # seconds of silence at which `cut_at_pauses` ends a window; shorter silences stay inside it
# minimum blocks (0.1 s each) of a clear pause; if `latest` is set, a full window is cut at its last clear pause
CLEAR_PAUSE_BLOCKS = 5
MIN_VOICED_BLOCKS = 2  # minimum number of voiced blocks in a window; a window with fewer is taken for noise and dropped


@final
class StreamResampler:
    """Resamples a stream to 16 kHz, chunk by chunk. The samples equal those of `resample` for the whole recording.

    Args:
        rate: The sample rate in Hz of the audio that arrives.
    """

    def __init__(self, rate: int) -> None:
        self._stream = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")

    def add(self, samples: np.ndarray, last: bool = False) -> Tensor:
        """Resample the next samples (T,).

        Args:
            last: Whether the stream ends with them.

        Returns:
            The samples at 16 kHz that can be computed so far; with `last`, all that remain.
        """
        data = np.ascontiguousarray(samples, dtype=np.float32)
        if self._stream is not None:
            data = self._stream.resample_chunk(data, last=last)
        return torch.from_numpy(np.array(data, dtype=np.float32))


@final
class VoiceGate:
    """Voice activity detection: decides for each block of a stream whether it contains speech, from the audio so far.

    The noise level is estimated from the first second. Until then blocks wait for their decision, so that noise at a
    stream's beginning is not taken for speech.
    """

    def __init__(self) -> None:
        # for each recent block: the RMS levels of its frames, without those that are silence
        self._levels: deque[np.ndarray] = deque(maxlen=HISTORY)
        self._faint = QUIET_SILENCE_LEVEL  # level of frames that are silence
        self._settled = False  # whether the noise level has been estimated
        # blocks that wait until the noise level is known, each with the levels of its frames
        self._waiting: list[tuple[Tensor, np.ndarray]] = []

    @property
    def waiting(self) -> int:
        """The number of blocks that wait for their decision."""
        return len(self._waiting)

    def add(self, block: Tensor) -> list[tuple[Tensor, bool]]:
        """Add the stream's next block, samples (BLOCK,).

        Returns:
            The blocks that are decided now, each as (block, whether it contains speech).
        """
        frames = block.reshape(FRAMES, STEP_SAMPLES)
        # the mean is subtracted, because a microphone may add a constant
        level = (frames - block.mean()).square().mean(1).sqrt().numpy()
        # the stream is not quiet: its noise is estimated again
        if self._faint == QUIET_SILENCE_LEVEL and (level >= SILENCE_LEVEL).any():
            self._faint, self._settled = SILENCE_LEVEL, False
            self._levels.clear()
            # what came before is silence now
            before, self._waiting = [(waiting, False) for waiting, _ in self._waiting], []
            return before + self._add(block, level)
        return self._add(block, level)

    def _add(self, block: Tensor, level: np.ndarray) -> list[tuple[Tensor, bool]]:
        """Add a block with the levels of its frames, and return the blocks that are decided now."""
        audible = bool((level >= self._faint).any())
        # digital silence (a microphone that is off) must not lower the noise estimate
        self._levels.append(level[level >= (SILENCE_LEVEL if self._faint == SILENCE_LEVEL else OFF_LEVEL)])
        if not audible and not self._waiting:
            return [(block, False)]
        if self._settled:
            return [(block, audible and self._is_voiced(level))]
        self._waiting.append((block, level))
        return self.end() if len(self._waiting) == NOISE_BLOCKS else []

    def end(self) -> list[tuple[Tensor, bool]]:
        """Decide all waiting blocks, because the noise level is now known or the stream has ended.

        Returns:
            A list of (block, whether it contains speech).
        """
        decided = [(block, self._is_voiced(level)) for block, level in self._waiting]
        self._waiting, self._settled = [], True
        return decided

    def _is_voiced(self, level: np.ndarray) -> bool:
        levels = np.concatenate(self._levels)
        noise, loud = np.quantile(levels, [0.1, 0.95])
        return int((level >= max(loud * BELOW_LOUD, noise * ABOVE_NOISE, self._faint)).sum()) >= MIN_VOICED_FRAMES


@dataclass(frozen=True)
class SpeechWindow:
    """A section of a stream that contains speech and is decoded by itself."""

    start: int  # index in the 16 kHz stream of the window's first sample
    samples: Tensor  # (T,) float32 at 16 kHz

    @property
    def end(self) -> int:
        """The index in the 16 kHz stream of the first sample after the window."""
        return self.start + len(self.samples)


def cut_at_pauses(samples: Tensor, max_samples: int) -> list[SpeechWindow]:
    """Cut a 16 kHz recording (T,) at pauses into as few windows as possible.

    Args:
        max_samples: Maximum samples of a window. Long silences are left out.
    """
    windows = SpeechWindows(LONG_SILENCE, max_samples, latest=True)
    return [*windows.add(samples), *windows.end()]


@final
class SpeechWindows:
    """Cuts a stream into windows with speech, and drops the silence between them.

    Holds the blocks of the window that is still open.

    A window begins shortly before speech. It closes after a pause, or when it is full. A full window is cut at its
    longest pause, else at its quietest block, and what follows the cut begins the next window.

    Args:
        pause: A window closes after this many seconds without speech.
        max_samples: Maximum samples of a window.
        latest: Whether a full window is cut at its last clear pause instead of its longest pause.
    """

    def __init__(self, pause: float, max_samples: int, latest: bool = False) -> None:
        self._latest = latest
        self._gate, self._pause, self._max_blocks = VoiceGate(), max(round(pause * 10), TAIL + 1), max_samples // BLOCK
        self._blocks: list[Tensor] = []  # blocks of the open window; while there is no speech, only the newest blocks
        self._voiced: list[bool] = []  # for each block in `_blocks`: whether it contains speech
        self._start = 0  # index in the stream of the first sample in `_blocks`
        self._rest = torch.zeros(0)  # samples at the end of the stream that do not fill a block yet

    @property
    def sample_count(self) -> int:
        """The number of samples that were added to the stream so far."""
        return self._start + sum(map(len, self._blocks)) + self._gate.waiting * BLOCK + len(self._rest)

    def add(self, samples: Tensor) -> list[SpeechWindow]:
        """Append 16 kHz samples (T,) to the stream.

        Returns:
            The windows that are complete now.
        """
        closed = list[SpeechWindow]()
        whole = torch.cat([self._rest, samples])
        count = len(whole) // BLOCK
        for index in range(count):
            block = whole[index * BLOCK : (index + 1) * BLOCK]
            closed += self._add(self._gate.add(block.clone() if count == 1 else block))
        self._rest = whole[count * BLOCK :].clone()
        return closed

    def end(self) -> list[SpeechWindow]:
        """End the stream.

        Returns:
            A list with the last window, or an empty list.
        """
        rest, self._rest = self._rest, torch.zeros(0)
        decided = self._gate.add(torch.nn.functional.pad(rest, (0, BLOCK - len(rest)))) if len(rest) else []
        closed = self._add([*decided, *self._gate.end()])
        if len(rest):
            self._blocks[-1] = self._blocks[-1][: len(rest)]
        if any(self._voiced):
            closed += self._close(min(self._last() + TAIL, len(self._blocks)))
        return closed

    def open(self) -> tuple[SpeechWindow, bool] | None:
        """Return the open window as it is now, and whether a pause has begun; None if no window is open.

        After the beginning of a pause, the window will close unchanged unless speech continues.
        """
        if sum(self._voiced) < MIN_VOICED_BLOCKS:
            return None
        cut = self._last() + TAIL
        return SpeechWindow(self._start, torch.cat(self._blocks[:cut])), cut <= len(self._blocks)

    def _add(self, decided: list[tuple[Tensor, bool]]) -> list[SpeechWindow]:
        closed = list[SpeechWindow]()
        for block, voiced in decided:
            self._blocks.append(block)
            self._voiced.append(voiced)
            if not any(self._voiced):
                self._drop(len(self._blocks) - LEAD)
            elif len(self._blocks) - self._last() >= self._pause:
                closed += self._close(self._last() + TAIL)
            elif len(self._blocks) >= self._max_blocks:
                closed += self._close(self._pause_inside())
        return closed

    def _last(self) -> int:
        return max(index for index, voiced in enumerate(self._voiced) if voiced) + 1

    def _pause_inside(self) -> int:
        """Find where to cut a full window, as a number of blocks.

        The cut is in the second half: in the middle of the longest pause, or with `latest` of the last clear pause;
        without a pause at the quietest block.
        """
        half, runs, begin = len(self._blocks) // 2, list[tuple[int, int]](), 0
        for index, voiced in enumerate([*self._voiced, True]):
            if voiced:
                if index > max(begin, half):
                    runs.append((index - max(begin, half), (max(begin, half) + index + 1) // 2))
                begin = index + 1
        runs = [run for run in runs if run[1] < len(self._blocks)]
        clear = [run for run in runs if run[0] >= CLEAR_PAUSE_BLOCKS]
        if clear and self._latest:
            return clear[-1][1]
        if runs:
            return max(runs)[1]
        levels = [float(block.square().mean()) for block in self._blocks[half:-LEAD]]
        return half + levels.index(min(levels))

    def _close(self, cut: int) -> list[SpeechWindow]:
        """Return a list with the first `cut` blocks as a window; an empty list if they contain too little speech.

        The other blocks begin the next window.
        """
        window = SpeechWindow(self._start, torch.cat(self._blocks[:cut]))
        has_voice = sum(self._voiced[:cut]) >= MIN_VOICED_BLOCKS
        self._drop(cut)
        if not any(self._voiced):
            self._drop(len(self._blocks) - LEAD)
        return [window] if has_voice else []

    def _drop(self, count: int) -> None:
        if count > 0:
            self._start += sum(map(len, self._blocks[:count]))
            del self._blocks[:count], self._voiced[:count]
