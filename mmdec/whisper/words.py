"""Computes start and end time of each token in an audio window, from cross-attention and loudness.

transformers' `token_timestamps` give each token one time, at which attention moves on; so a pause belongs to the word
before it. Here each token gets a start and an end. Dynamic programming finds the best path through the window's frames:
it visits the tokens in order, and may stay in a gap before a word. Attention shows which token a frame belongs to.
Loudness shows whether the frame is speech at all.
A token's attention is that of the step which predicts this token. (transformers uses the following step, which attends
to the next token and is late by about one token.)

References:
    The dynamic programming is Whisper's (Radford et al. 2022, `word_timestamps`); the gaps are an addition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from mmdec.errors import InputError

STATE_SECONDS = 0.02  # seconds of audio for each encoder state, the frame of the alignment
MELS_A_STATE = 2  # mel frames for each encoder state
# percentiles of a window's log power that count as silence (0) and as speech (1)
SILENCE_PERCENTILE, SPEECH_PERCENTILE = 5.0, 95.0
# on the scale from silence (0) to speech (1): the level at which a frame is as likely speech as silence
SPEECH_LEVEL = 0.45
SMOOTHING_FRAMES = 5  # mel frames over which loudness is averaged
# Noise without speech is steady: over NOISE_FRAMES mel frames its log power deviates by less than MAX_NOISE_DEVIATION,
# and its level is below MAX_NOISE_LEVEL.
NOISE_FRAMES, MAX_NOISE_DEVIATION, MAX_NOISE_LEVEL = 100, 0.2, 0.95
GAP_SCORE = 4.0  # score of a fully silent frame in a gap, in standard deviations of attention, the unit of token scores
MEDIAN_WIDTH = 7  # width of the median filter over attention, in encoder states
MAX_LATE_STATES = 25  # encoder states: how long speech may continue after the timestamp that ends its text
MAX_EARLY_STATES = 5  # encoder states by which a word may begin before the timestamp that ends the text before it
# encoder states by which attention may come before its sound; each window gets the best lead
ATTENTION_LEADS = (-2, 1, 4)
LONG_PAUSE_STATES = 100  # encoder states of silence before words that may be of the text after this one
FORBIDDEN_SCORE = -1e9  # score of a forbidden transition

# token ids -> for each, whether it begins a word; None: no sound
WordBeginnings = Callable[[Sequence[int]], list[bool | None]]


def check_alignment(model: WhisperForConditionalGeneration) -> None:
    """Raise InputError if the model has no attention heads whose alignment gives the times of words."""
    settings: Any = model.generation_config
    config, heads = model.config, getattr(settings, "alignment_heads", None)
    if not heads:
        fault = "no `alignment_heads`"
    elif any(layer >= config.decoder_layers or head >= config.decoder_attention_heads for layer, head in heads):
        fault = f"`alignment_heads` beyond its {config.decoder_layers} decoder layers"
    else:
        return
    raise InputError(
        f"`timestamps` must be None or 'segment' for a model whose generation config names {fault}, but is 'word'. Set "
        "them, or ask for segments."
    )


def loudness(features: np.ndarray) -> np.ndarray:
    """Return the loudness (S,) at each of the S encoder states, from -1 (silence) to 1 (as loud as speech).

    A stretch of at least a second whose power hardly varies is silence if speech is louder: the noise of a room is loud
    compared with digital silence elsewhere in the window.

    Args:
        features: (mels, 2 S), the window's log-mel features as Whisper reads them: (log10 of power + 4) / 4.
    """
    decibels = np.log10((10.0 ** (features.astype(np.float64) * 4 - 4)).sum(0) + 1e-12)
    low, high = np.percentile(decibels, (SILENCE_PERCENTILE, SPEECH_PERCENTILE))
    level = (decibels - low) / max(high - low, 1e-3)
    quieter = level < MAX_NOISE_LEVEL
    window = np.ones(SMOOTHING_FRAMES) / SMOOTHING_FRAMES
    level = np.convolve(np.pad(level, SMOOTHING_FRAMES // 2, mode="edge"), window, "valid")
    spoken = np.clip(2 * (level - SPEECH_LEVEL), -1, 1)
    if len(decibels) >= NOISE_FRAMES:
        steady = np.lib.stride_tricks.sliding_window_view(decibels, NOISE_FRAMES).std(1) < MAX_NOISE_DEVIATION
        # a frame is steady if any stretch that holds it is
        spoken[: len(decibels)][(np.convolve(steady, np.ones(NOISE_FRAMES)) > 0) & quieter] = -1
    return spoken[: len(spoken) // MELS_A_STATE * MELS_A_STATE].reshape(-1, MELS_A_STATE).mean(1)


def mean_attention(maps: Tensor) -> np.ndarray:
    """Average attention maps (H, N, S) of H heads, N tokens and S encoder states into one map (N, S).

    Each head's map is first normalised over the tokens to mean 0 and standard deviation 1, and smoothed over the states
    by a median filter.
    """
    maps = maps.float()
    spread = maps.std(-2, keepdim=True, unbiased=False)
    maps = (maps - maps.mean(-2, keepdim=True)) / (spread + 1e-9)
    half = MEDIAN_WIDTH // 2
    if maps.shape[-1] > half:
        maps = torch.nn.functional.pad(maps, (half, half), mode="reflect").unfold(-1, MEDIAN_WIDTH, 1).median(-1).values
    return maps.mean(0).double().cpu().numpy()


def shift_to_sound(attention: np.ndarray, loud: np.ndarray) -> np.ndarray:
    """Shift attention in time so that its peaks fit the loud frames best.

    Args:
        attention: (N, S), attention of N tokens to S encoder states.
        loud: (S,), loudness from -1 to 1.

    Returns:
        (N, S).
    """
    frames = np.arange(len(loud))
    moves = [np.clip(frames - lead, 0, len(loud) - 1) for lead in ATTENTION_LEADS]
    peaks = np.stack([attention.max(0)[move] for move in moves])
    peaks -= peaks.mean(1, keepdims=True)
    agreement = peaks @ (loud - loud.mean()) / (np.linalg.norm(peaks, axis=1) + 1e-9)
    return attention[:, moves[int(agreement.argmax())]]


def align(tokens: np.ndarray, loud: np.ndarray, begins: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Find the frames of each token by dynamic programming.

    A frame is an encoder state, 20 ms.

    Args:
        tokens: (N, S), how well each frame fits each token, in standard deviations of attention.
        loud: (S,), loudness from -1 to 1.
        begins: (N,), whether a gap is allowed before the token; before the first token and after the last token a gap
            is always allowed.

    Returns:
        Two arrays (N,): each token's first frame, and the frame after its last frame.
    """
    count, frames = tokens.shape
    if count >= frames:  # no path gives each token a frame: spread them evenly
        edges = np.linspace(0, frames, count + 1)
        return edges[:-1], edges[1:]
    # Numbers of the path's states: 2 i is the gap before token i; 2 i + 1 is token i; 2 N is the gap after the last
    # token.
    frame_scores = np.empty((2 * count + 1, frames))
    frame_scores[0::2] = -GAP_SCORE * loud
    frame_scores[1::2] = tokens + GAP_SCORE * loud
    frame_scores[[2 * at for at in range(1, count) if not begins[at]]] = FORBIDDEN_SCORE
    # the path may skip a gap, but not a token
    skips = np.where(np.arange(2 * count + 1) % 2 == 1, 0.0, FORBIDDEN_SCORE)
    best = np.full(2 * count + 1, FORBIDDEN_SCORE)
    best[:2] = frame_scores[:2, 0]
    back = np.zeros((frames, 2 * count + 1), np.int8)
    ways = np.full((3, 2 * count + 1), FORBIDDEN_SCORE)
    for frame in range(1, frames):
        ways[0], ways[1, 1:] = best, best[:-1]
        ways[2, 2:] = best[:-2] + skips[2:]
        back[frame] = ways.argmax(0)
        best = ways.max(0) + frame_scores[:, frame]
    state = 2 * count - int(best[2 * count - 1] > best[2 * count])
    states = np.empty(frames, np.int64)
    for frame in range(frames - 1, -1, -1):
        states[frame] = state
        state -= int(back[frame, state])
    token_states = 2 * np.arange(count) + 1
    return np.searchsorted(states, token_states, "left"), np.searchsorted(states, token_states, "right")


def align_text(tokens: np.ndarray, loud: np.ndarray, begins: Sequence[bool], end: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the frames of each token as `align` does, but let no word begin after a long pause that follows the text.

    If a sentence is repeated after a pause, its last words get attention at both places, of which the later one belongs
    to the next text. Then the words are aligned only to the sound before the pause, if it has a frame for each token.

    Args:
        tokens: (N, S), how well each frame fits each token, as for `align`.
        loud: (S,), loudness from -1 to 1.
        begins: (N,), whether a gap is allowed before the token.
        end: The frame of the timestamp that ends the text.
    """
    starts, ends = align(tokens, loud, begins)
    pauses = [at for at in range(1, len(starts)) if starts[at] - ends[at - 1] >= LONG_PAUSE_STATES]
    if not pauses or starts[pauses[-1]] < end - MAX_EARLY_STATES:
        return starts, ends
    before = int(starts[pauses[-1]])
    return align(tokens[:, :before], loud[:before], begins) if len(tokens) < before else (starts, ends)


def align_window(
    output: Any,
    features: Tensor,
    prompt: int,
    frames: int | None,
    *,
    heads: Sequence[Sequence[int]],
    begins: WordBeginnings,
    first_time: int,
) -> tuple[Tensor, Tensor]:
    """Align the tokens of one window to attention and loudness.

    Tokens without sound (punctuation, timestamps) begin and end where the token before them ends.

    Args:
        output: `generate`'s output for the window, with `sequences` (1, L) and `cross_attentions`.
        features: (1, mels, T), the window's log-mel features.
        prompt: Number of prompt tokens.
        frames: Number of mel frames with sound; None: all.
        heads: (layer, head) pairs, whose attention is read.
        begins: Called with token ids; returns for each whether it begins a word, None for a token without sound.
        first_time: Id of the timestamp token of 0 seconds.

    Returns:
        Start and duration (L,) of each token in seconds; 0 for the prompt.
    """
    layers = {layer: torch.cat([step[layer] for step in output.cross_attentions], 2)[0] for layer, _ in heads}
    maps = torch.stack([layers[layer][head] for layer, head in heads])  # shape (H, L - 1, S)
    row: list[int] = output.sequences[0].tolist()
    tokens = row[prompt:]
    marks = begins(tokens)
    times = np.zeros((2, len(row)))
    spoken = [prompt + at for at, mark in enumerate(marks) if mark is not None]
    if spoken:
        end = _end_state(tokens, marks, first_time)
        sounding = maps.shape[-1] if frames is None else frames // MELS_A_STATE
        # no word may begin later than 0.5 s after the text's end
        states = max(1, min(sounding, maps.shape[-1], min(end, sys.maxsize - MAX_LATE_STATES) + MAX_LATE_STATES))
        attention = mean_attention(maps[:, [at - 1 for at in spoken], :states])
        loud = loudness(features[0, :, : states * MELS_A_STATE].float().cpu().numpy())
        new = [bool(marks[at - prompt]) for at in spoken]
        starts, ends = align_text(shift_to_sound(attention, loud), loud, new, end)
        times[0, spoken], times[1, spoken] = starts, ends - starts
        last = float(starts[0])
        for at in range(prompt, len(row)):
            if marks[at - prompt] is None:
                times[0, at] = last
            last = float(times[:, at].sum())
    starts_seconds, durations = torch.from_numpy(times * STATE_SECONDS)
    return starts_seconds, durations


def _end_state(tokens: Sequence[int], begins: Sequence[bool | None], first_time: int) -> int:
    """Return the encoder state of the timestamp that ends the text; `sys.maxsize` if there is none.

    Args:
        tokens: The text's tokens, without the prompt.
        begins: For each token, whether it begins a word; None: without sound.
        first_time: Id of the timestamp token of 0 seconds.
    """
    last = len(tokens)
    while last and begins[last - 1] is None and tokens[last - 1] < first_time:
        last -= 1
    ended = last > 0 and tokens[last - 1] >= first_time
    return tokens[last - 1] - first_time if ended else sys.maxsize
