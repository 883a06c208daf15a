"""Speech as tokens: codes of log-mel frames, prompts in CosyVoice 2's order, and its repetition-aware sampling.

A prompt is `<|sos|>`, the text of the prompt's speech and the text to say, `<|task_id|>`, and the codes of the prompt's
speech, which the model continues. The marks are those of converted CosyVoice 2 and 3 checkpoints
(yuekai/cosyvoice2_llm), so `SpeechTokens` serves them, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmdec.daspeech.piece_checkpoint import read_piece_translator
from mmdec.daspeech.piece_translator import EOS
from mmdec.errors import InputError

ROOT = Path(__file__).parents[2]
START, TASK = "<|sos|>", "<|task_id|>"
ENDS = ("<|eos1|>", "<|eos|>")  # CosyVoice 2's end token, CosyVoice 3's
CODE = re.compile(r"<\|s_(\d+)\|>")
FRAMES = 3  # 16 ms frames of a code
KMEANS_ROUNDS = 15


@dataclass(frozen=True)
class SpeechTokens:
    """The marks and codes in a tokenizer's vocabulary."""

    end: int  # token id of the end
    first_code: int  # token id of code 0; the others follow it
    codes: int  # number of codes

    @classmethod
    def of(cls, tokenizer: Any) -> SpeechTokens:
        """Find them by their names.

        Raises:
            InputError: If the tokenizer lacks them, or the codes do not follow each other.
        """
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        ends = [vocabulary[name] for name in ENDS if name in vocabulary]
        ids = {int(match[1]): at for name, at in vocabulary.items() if (match := CODE.fullmatch(name))}
        first = ids.get(0, -1)
        if not ends or not {START, TASK} <= set(vocabulary) or ids != {code: first + code for code in range(len(ids))}:
            raise InputError(
                f"`tokenizer` must have {START}, {TASK}, {' or '.join(ENDS)} and <|s_0|>, <|s_1|>, ... in a row, but "
                "lacks some. Take a converted CosyVoice checkpoint's, or one of recipes/speech_tokens/train.py."
            )
        return cls(ends[0], first, len(ids))

    def prompt(self, text: str, prompt_text: str = "", prompt_codes: Sequence[int] = ()) -> str:
        """Build a prompt.

        Args:
            text: What to say.
            prompt_text: What the prompt's speech says.
            prompt_codes: The codes of the prompt's speech.

        Raises:
            InputError: For codes outside of the codebook, or prompt speech without its text.
        """
        wrong = [code for code in prompt_codes if not 0 <= code < self.codes]
        if wrong:
            raise InputError(
                f"`prompt_codes` must be codes from 0 to {self.codes - 1}, but hold {wrong[0]}. Give codes of this "
                "model's codebook, not token ids."
            )
        if bool(prompt_text) != bool(len(prompt_codes)):
            raise InputError("`prompt_text` must come with `prompt_codes`, but one is missing. Give both or none.")
        return f"{START}{prompt_text}{text}{TASK}{''.join(f'<|s_{code}|>' for code in prompt_codes)}"

    def codes_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the codes of generated tokens, up to the end.

        Raises:
            InputError: If one is neither a code nor the end.
        """
        tokens = list(tokens)
        tokens = tokens[: tokens.index(self.end)] if self.end in tokens else tokens
        wrong = [token for token in tokens if not 0 <= token - self.first_code < self.codes]
        if wrong:
            raise InputError(f"`tokens` must be codes, but hold the token {wrong[0]}. Leave the prompt out.")
        return [token - self.first_code for token in tokens]


class RepetitionAware(LogitsProcessor):
    """Turns logits into the distribution of repetition-aware sampling, so that it can be drafted losslessly.

    A token is drawn from a nucleus; if it is among the last `window` new ones, another is drawn from all tokens. So
    with n the nucleus' distribution, f the full one and R the recent tokens, p(v) = n(v) [v not in R] + n(R) f(v).
    Draw from it with `do_sample=True, top_k=0`.

    Args:
        prompt: Number of tokens of the prompt, whose tokens do not count as recent.

    References:
        VALL-E 2, Chen et al. 2024, arXiv 2406.05370; the defaults are CosyVoice 2's.
    """

    mmdec_row_wise = True

    def __init__(self, prompt: int, top_p: float = 0.8, top_k: int = 25, window: int = 10) -> None:
        self.prompt, self.top_p, self.top_k, self.window = prompt, top_p, top_k, window

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        full = scores.softmax(-1)
        best, ids = full.topk(min(self.top_k, full.shape[-1]))
        nucleus = torch.zeros_like(full).scatter_(1, ids, best * (best.cumsum(-1) - best < self.top_p))
        nucleus = nucleus / nucleus.sum(-1, keepdim=True)
        recent = torch.zeros_like(full).scatter_(1, input_ids[:, self.prompt :][:, -self.window :], 1.0)
        return (nucleus * (1 - recent) + (nucleus * recent).sum(-1, keepdim=True) * full).log()


class Speaker:
    """Says English texts as log-mel frames, with the voice of the shipped translator in changing styles."""

    def __init__(self) -> None:
        folder = ROOT / "models" / "daspeech-everyday"
        parts = read_piece_translator(folder, json.loads((folder / "config.json").read_text(encoding="utf-8")))
        self.tts, self.speller = parts.voice.tts.eval(), parts.speller
        self.phones = {phone: at for at, phone in enumerate(parts.phones)}

    @torch.no_grad()
    def say(self, text: str, rng: torch.Generator, style: tuple[float, float]) -> Tensor:
        """Return the log mels (F, 80) of a text; durations vary by chance.

        Args:
            style: Factors of the durations and of the pitch.
        """
        ids = [self.phones[phone] for phone in self.speller.phones(text) if phone in self.phones]
        inputs, lengths = self.tts.embed(torch.tensor([[*ids, EOS]])), torch.tensor([len(ids) + 1])
        plain = self.tts(inputs, lengths)
        jitter = (0.25 * torch.randn(plain.durations.shape, generator=rng)).exp() * style[0]
        durations = (plain.durations * jitter).round().clamp(min=1)
        durations[:, -1] = 0
        return self.tts(inputs, lengths, durations, plain.pitch.expm1() * style[1]).mel[0]


def frames_of(mel: Tensor) -> Tensor:
    """Return the mean (N, 80) of every `FRAMES` frames of a log mel."""
    count = math.ceil(len(mel) / FRAMES)
    return torch.stack([mel[FRAMES * at : FRAMES * (at + 1)].mean(0) for at in range(count)])


def codebook_of(frames: Tensor, codes: int, seed: int = 0) -> Tensor:
    """Return the means (C, 80) that k-means finds in frames (N, 80)."""
    rng = torch.Generator().manual_seed(seed)
    means = frames[torch.randperm(len(frames), generator=rng)[:codes]].clone()
    for _ in range(KMEANS_ROUNDS):
        nearest = torch.cdist(frames, means).argmin(1)
        counts = nearest.bincount(minlength=codes)
        sums = torch.zeros_like(means).index_add_(0, nearest, frames)
        means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], means)
    return means


def warped_distance(one: Tensor, other: Tensor) -> float:
    """Return the mean Euclidean distance along the best alignment (dynamic time warping) of frames (N, 80), (M, 80)."""
    costs = torch.cdist(one, other).tolist()
    best: list[list[tuple[float, int]]] = []
    for row, line in enumerate(costs):
        best.append([])
        for column, cost in enumerate(line):
            before = [(0.0, 0)] if row == column == 0 else []
            before += [best[row - 1][column]] if row else []
            before += [best[row][column - 1]] if column else []
            before += [best[row - 1][column - 1]] if row and column else []
            total, steps = min(before)
            best[row].append((total + cost, steps + 1))
    total, steps = best[-1][-1]
    return total / steps


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the least number of substitutions, deletions and insertions between two sequences of codes."""
    row = list(range(len(other) + 1))
    for left, code in enumerate(one, 1):
        diagonal, row[0] = row[0], left
        for right, against in enumerate(other, 1):
            diagonal, row[right] = row[right], min(row[right] + 1, row[right - 1] + 1, diagonal + (code != against))
    return row[-1]
