"""Finds when each token of a window is spoken: aligns tokens to the sound by cross-attention and loudness.

transformers' `token_timestamps` give each token one time, the moment at which attention moves on; pauses belong to the
word before them. Here each token gets a start and an end. One path through the window's frames takes each token in
order and may rest in a gap before a word. Attention says which token a frame belongs to. Loudness says whether the
frame belongs to a token at all.
Attention is read from the step that predicts a token (transformers reads the step after it, which looks at the next
token and is late by about a token).
Source: the alignment by dynamic programming is Whisper's (Radford et al. 2022, `word_timestamps`); gaps are ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

FRAME = 0.02  # seconds of sound for each state of the encoder
MELS_A_STATE = 2  # frames of features for each state of the encoder
FLOOR, CEILING = 5.0, 95.0  # percentiles of a window's loudness that count as silence and as speech
HALF = 0.45  # on that scale from silence (0) to speech (1), the loudness at which both are equally likely
SMOOTH = 5  # frames of the features over which loudness is averaged
GAP = 4.0  # score of a silent frame for a gap between words, in standard deviations of attention
WIDTH = 7  # width in frames of the median filter over attention
LATE = 25  # maximum frames (states) by which speech may go on after the timestamp that ends its text
LEADS = (-2, 1, 4)  # frames by which attention may come before its sound: models differ
NEVER = -1e9  # score of an impossible step

Begins = Callable[[Sequence[int]], list[bool | None]]  # for each token id, whether it begins a word; None: not spoken


def loudness(features: np.ndarray) -> np.ndarray:
    """Return the loudness (S,) at each of the encoder's S states, from -1 (silent) to 1 (as loud as speech).

    features: log-mel of the window as Whisper reads it, (mels, 2 S): (log10 of power + 4) / 4.
    """
    decibels = np.log10((10.0 ** (features.astype(np.float64) * 4 - 4)).sum(0) + 1e-12)
    low, high = np.percentile(decibels, (FLOOR, CEILING))
    level = (decibels - low) / max(high - low, 1e-3)
    level = np.convolve(np.pad(level, SMOOTH // 2, mode="edge"), np.ones(SMOOTH) / SMOOTH, "valid")
    spoken = np.clip(2 * (level - HALF), -1, 1)
    return spoken[: len(spoken) // MELS_A_STATE * MELS_A_STATE].reshape(-1, MELS_A_STATE).mean(1)


def attended(maps: Tensor) -> np.ndarray:
    """Merge attention (H, N, S) of H heads into one map (N, S): how many standard deviations more than the other tokens
    a token attends to each frame. Each head's map is smoothed by a median filter."""
    maps = maps.float()
    spread = maps.std(-2, keepdim=True, unbiased=False)
    maps = (maps - maps.mean(-2, keepdim=True)) / (spread + 1e-9)
    half = WIDTH // 2
    if maps.shape[-1] > half:
        maps = torch.nn.functional.pad(maps, (half, half), mode="reflect").unfold(-1, WIDTH, 1).median(-1).values
    return maps.mean(0).double().cpu().numpy()


def moved_to_sound(seen: np.ndarray, loud: np.ndarray) -> np.ndarray:
    """Shift attention in time by that number of frames in `LEADS` with which its peaks fit the loud frames best. seen:
    (N, S) from `attended`. loud: (S,) from `loudness`. Returns: (N, S)."""
    frames = np.arange(len(loud))
    moves = [np.clip(frames - lead, 0, len(loud) - 1) for lead in LEADS]
    peaks = np.stack([seen.max(0)[move] for move in moves])
    peaks -= peaks.mean(1, keepdims=True)
    agreement = peaks @ (loud - loud.mean()) / (np.linalg.norm(peaks, axis=1) + 1e-9)
    return seen[:, moves[int(agreement.argmax())]]


def align(tokens: np.ndarray, loud: np.ndarray, begins: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Find the first frame of each token, and the frame after its last: two arrays (N,).

    tokens: (N, S) how well each frame fits each token. loud: (S,) from `loudness`. begins: (N,) whether a gap may stand
    before the token; a gap may always stand before the first token and after the last.
    """
    count, frames = tokens.shape
    if count >= frames:  # more tokens than frames: spread them evenly
        edges = np.linspace(0, frames, count + 1)
        return edges[:-1], edges[1:]
    # States: 2 i is the gap before token i, 2 i + 1 the token, 2 N the gap after the last one.
    worth = np.empty((2 * count + 1, frames))
    worth[0::2] = -GAP * loud
    worth[1::2] = tokens + GAP * loud
    worth[[2 * at for at in range(1, count) if not begins[at]]] = NEVER
    skips = np.where(np.arange(2 * count + 1) % 2 == 1, 0.0, NEVER)  # score of moving from token to token without a gap
    best = np.full(2 * count + 1, NEVER)
    best[:2] = worth[:2, 0]
    back = np.zeros((frames, 2 * count + 1), np.int8)
    ways = np.full((3, 2 * count + 1), NEVER)
    for frame in range(1, frames):
        ways[0], ways[1, 1:] = best, best[:-1]
        ways[2, 2:] = best[:-2] + skips[2:]
        back[frame] = ways.argmax(0)
        best = ways.max(0) + worth[:, frame]
    state = 2 * count - int(best[2 * count - 1] > best[2 * count])
    states = np.empty(frames, np.int64)
    for frame in range(frames - 1, -1, -1):
        states[frame] = state
        state -= int(back[frame, state])
    wanted = 2 * np.arange(count) + 1
    return np.searchsorted(states, wanted, "left"), np.searchsorted(states, wanted, "right")


@final
class SpokenTokens:
    """Replaces a model's method `_extract_token_timestamps` in one call of `generate`.

    It returns each token's start, for `token_timestamps`, and stores its duration as `token_seconds` in the output.
    Tokens that are not spoken (punctuation, timestamps) begin and end where the token before them ends.
    """

    def __init__(self, layers: int, begins: Begins, sound: Callable[[], Tensor], first_time: int) -> None:
        """layers: the decoder's layers. begins: for each token id, whether it begins a word; None: not spoken.
        sound: the features (B, mels, T) of the rows that were decoded last. first_time: the id of the timestamp 0."""
        self._layers, self._begins, self._sound, self._first_time = layers, begins, sound, first_time

    def __call__(
        self,
        output: Any,
        alignment_heads: Sequence[Sequence[int]],
        time_precision: float = FRAME,
        num_frames: Any = None,
        num_input_ids: int = 1,
    ) -> Tensor:
        """Compute the times of all tokens (B, L) in seconds; those of the prompt are 0.

        output: one window's, with `cross_attentions`. alignment_heads: (layer, head) pairs. num_frames: number of
        feature frames with sound, for all rows or for each. num_input_ids: number of columns of the prompt.
        """
        layers = [torch.cat([step[layer] for step in output.cross_attentions], 2) for layer in range(self._layers)]
        maps = torch.stack([layers[layer][:, head] for layer, head in alignment_heads], 1)  # (B, H, L - 1, S)
        rows: list[list[int]] = output.sequences.tolist()
        times = np.zeros((2, len(rows), len(rows[0])))
        counts = np.broadcast_to(
            np.asarray(maps.shape[-1] * MELS_A_STATE if num_frames is None else num_frames), len(rows)
        )
        sound = self._sound().float().cpu().numpy()
        for index, row in enumerate(rows):
            begins = self._begins(row[num_input_ids:])
            heard = min(int(counts[index]) // MELS_A_STATE, maps.shape[-1], self._cut(row[num_input_ids:], begins))
            states = max(1, heard)
            spoken = [num_input_ids + at for at, begin in enumerate(begins) if begin is not None]
            if not spoken:
                continue
            seen = attended(maps[index, :, [at - 1 for at in spoken], :states])
            loud = loudness(sound[index, :, : states * MELS_A_STATE])
            starts, ends = align(moved_to_sound(seen, loud), loud, [bool(begins[at - num_input_ids]) for at in spoken])
            times[0, index, spoken], times[1, index, spoken] = starts, ends - starts
            end = float(starts[0])
            for at in range(num_input_ids, len(row)):
                if begins[at - num_input_ids] is None:
                    times[0, index, at] = end
                end = float(times[:, index, at].sum())
        starts, seconds = torch.from_numpy(times * time_precision)
        output["token_seconds"] = seconds
        return starts

    def _cut(self, tokens: Sequence[int], begins: Sequence[bool | None]) -> int:
        """Return the maximum number of states to align. If the tokens end with a timestamp, speech long after it is not
        in their text and is left out. If not, there is no limit: `sys.maxsize`."""
        last = len(tokens)
        while last and begins[last - 1] is None and tokens[last - 1] < self._first_time:
            last -= 1
        ended = last > 0 and tokens[last - 1] >= self._first_time
        return tokens[last - 1] - self._first_time + LATE if ended else sys.maxsize


def time_tokens(model: WhisperForConditionalGeneration, begins: Begins, sound: Callable[[], Tensor]) -> None:
    """Make this model's `generate` compute token times by `SpokenTokens`. model: a copy for one call. begins, sound: as
    for `SpokenTokens`."""
    settings: Any = model.generation_config
    first_time = settings.no_timestamps_token_id + 1
    vars(model)["_extract_token_timestamps"] = SpokenTokens(model.config.decoder_layers, begins, sound, first_time)
