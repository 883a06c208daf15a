"""Tests the alignment of tokens to sound: pauses, punctuation, short windows, and rows of a batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdec.whisper.words import (
    ATTENTION_LEADS,
    align,
    align_text,
    align_window,
    loudness,
    mean_attention,
    shift_to_sound,
)

MELS = 80
# Three words: [first, last) state; a pause of 40 states is between the second and the third.
SPOKEN = ((20, 50), (50, 80), (120, 160))
STATES = 200


def features(*spoken: tuple[int, int]) -> Tensor:
    """Log-mel (mels, 2 STATES) that is loud in these states, and noise elsewhere."""
    sound = torch.full((MELS, 2 * STATES), -1.0) + 0.01 * torch.randn(MELS, 2 * STATES)
    for begin, end in spoken:
        sound[:, 2 * begin : 2 * end] = 0.8
    return sound


def looks(*spoken: tuple[int, int], lead: int = ATTENTION_LEADS[-1]) -> Tensor:
    """Attention (N, STATES) of steps that look at their own word, `lead` states early, and a little everywhere."""
    maps = torch.full((len(spoken), STATES), 1e-3)
    for row, (begin, end) in enumerate(spoken):
        maps[row, max(begin - lead, 0) : end - lead] += 0.03
    return maps / maps.sum(-1, keepdim=True)


def aligned(maps: Tensor, begins: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Alignment of maps (N, STATES) to the sound of `SPOKEN`."""
    loud = loudness(features(*SPOKEN).numpy())
    return align(shift_to_sound(mean_attention(maps[None]), loud), loud, begins)


@pytest.mark.parametrize("lead", ATTENTION_LEADS)
def test_words_are_aligned_with_their_sound(lead: int) -> None:
    """However early or late the model attends; two words without a pause reveal the shift."""
    starts, ends = aligned(looks(*SPOKEN, lead=lead), [True] * 3)
    assert np.abs(starts - [begin for begin, _ in SPOKEN]).max() <= 2
    assert np.abs(ends - [end for _, end in SPOKEN]).max() <= 2


def test_a_pause_belongs_to_no_word() -> None:
    maps = looks(SPOKEN[0], SPOKEN[1], (80, 160))
    starts, ends = aligned(maps, [True] * 3)
    assert abs(ends[1] - 80) <= 2
    assert abs(starts[2] - 120) <= 2


def test_a_word_of_several_tokens_has_no_gap_inside() -> None:
    starts, ends = aligned(looks(*SPOKEN), [True, True, False])
    assert ends[1] == starts[2]


def test_a_hundred_tokens_are_aligned_with_three_frames_each() -> None:
    starts, ends = align(np.kron(np.eye(100), np.ones(3)), np.ones(300), [True] * 100)
    assert starts.tolist() == list(range(0, 300, 3))
    assert ends.tolist() == list(range(3, 303, 3))


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_more_tokens_than_frames_are_aligned(count: int) -> None:
    starts, ends = align(np.zeros((count, 5)), np.ones(5), [True] * count)
    assert starts[0] >= 0
    assert ends[-1] <= 5
    assert (starts <= ends).all()
    assert (ends[:-1] <= starts[1:]).all()


def times_of(tokens: list[int], steps: list[Any], sound: Any, frames: int | None = None) -> tuple[Any, Any]:
    """Time tokens after a prompt of two; tokens 10 and 12 are words, and 50 is the first timestamp."""
    output = SimpleNamespace(cross_attentions=[(step[None, None],) for step in steps], sequences=torch.tensor([tokens]))
    starts, seconds = align_window(
        output,
        sound[None],
        2,
        frames,
        heads=[[0, 0]],
        begins=lambda row: [True if token in (10, 12) else None for token in row],
        first_time=50,
    )
    assert starts.shape == seconds.shape == (len(tokens),)
    assert not starts[:2].any()
    assert not seconds[:2].any()
    return starts[2:].tolist(), seconds[2:].tolist()


def test_tokens_without_sound_have_no_time() -> None:
    """Two prompt columns, then a word, a comma, and another word or what follows the end."""
    nowhere = torch.full((1, STATES), 1 / STATES)
    maps = torch.cat([nowhere, looks((20, 50), (50, 60), (120, 160))])
    starts, seconds = times_of([1, 2, 10, 11, 12], [maps[:2], maps[2:]], features((20, 50), (120, 160)), 400)
    assert starts == pytest.approx([0.4, 1.0, 2.4], abs=0.05)
    assert seconds == pytest.approx([0.6, 0.0, 0.8], abs=0.05)
    maps = torch.cat([nowhere, looks((30, 60), (60, 70), (90, 100))])
    starts, seconds = times_of([1, 2, 10, 11, 3], [maps[:2], maps[2:]], features((30, 60)), 200)
    assert starts == pytest.approx([0.6, 1.2, 1.2], abs=0.05)
    assert seconds[1:] == [0.0, 0.0]


def test_a_window_without_words_has_no_times() -> None:
    assert times_of([1, 2, 11, 3], [looks((0, 9), (9, 12), (12, 15))], features()) == ([0.0, 0.0], [0.0, 0.0])


def test_speech_long_after_the_last_timestamp_is_not_aligned() -> None:
    """A word from state 20 to 50, and speech without text from 60 to 140."""
    nowhere = torch.full((1, STATES), 1 / STATES)
    maps = torch.cat([nowhere, looks((20, 50)), nowhere, nowhere])  # of each step
    ends = list[float]()
    for tokens in ([1, 2, 10, 105, 3], [1, 2, 10, 11, 3]):  # with the timestamp 55, and without one
        starts, seconds = times_of(tokens, [maps], features((20, 50), (60, 140)))
        ends.append(starts[0] + seconds[0])
    assert 1.0 <= ends[0] <= 1.6
    assert ends[1] > 2.0


def test_room_noise_beside_digital_silence_counts_as_silence() -> None:
    """Two words, noise of a room between them, and digital silence before and after."""
    sound = torch.full((MELS, 2 * STATES), -1.5)
    noise = slice(2 * 40, 2 * 150)
    sound[:, noise] = 0.5 + 0.01 * torch.randn(MELS, 2 * 110)
    for word in (slice(2 * 20, 2 * 40), slice(2 * 150, 2 * 180)):
        width = word.stop - word.start
        sound[:, word] = 0.8 + 0.3 * torch.sin(torch.arange(width))  # speech varies
    loud = loudness(sound.numpy())
    assert (loud[45:145] == -1).all()
    assert loud[22:38].mean() > 0.5
    assert loud[152:178].mean() > 0.5


@pytest.mark.parametrize("end", [160, 195])
def test_words_before_a_pause_stay_before_it(end: int) -> None:
    """Three words, the third of which is said again, after a long pause, at the end of the text."""
    spans = ((10, 20), (20, 30), (30, 40))
    loud = loudness(features(*spans, (165, 180)).numpy())
    scores = np.full((3, STATES), -0.5)
    for row, (first, last) in enumerate(spans):
        scores[row, first:last] = 2.0
    scores[2, 165:180] = 9.0  # attention to the same word of the next text
    starts, ends = align_text(scores, loud, [True] * 3, end)
    if end == 195:  # the text goes on after the pause
        assert starts[2] >= 160
    else:
        assert abs(starts[2] - 30) <= 2
        assert abs(ends[2] - 40) <= 3
