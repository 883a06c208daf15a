"""One Whisper, several ways to decode with it, and what each call of `generate` spent: measured alike for all.

A call's seconds fall into features (log-mels of the samples), encoder (its forward pass, an assistant's encoder
included) and decoder: all the rest of `generate`, that is passes, drafting, verification, processors and transformers'
own preparations. Nothing here knows references or statistics.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from mmdec.audio import SAMPLE_RATE
from mmdec.decode.loop import Round
from mmdec.generation.speculation import DraftedBy, Nodes, speculate
from mmdec.hub.medusa import WEIGHTS
from mmdec.hub.whisper import HEADS, Whisper
from mmdec.types import InputError

PLAN = re.compile(r"(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Way:
    """How to decode: options for `generate`, and the rounds of the last call where mmdec's loop ran."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    networks: Sequence[PreTrainedModel] = ()  # beside the model


GREEDY = "greedy"


def greedy() -> Way:
    """transformers' own loop."""
    return Way(GREEDY)


def drafted(name: str, drafter: DraftedBy, nodes: Nodes = None) -> Way:
    """mmdec's loop; nodes as for `mmdec.speculate`."""
    rounds: list[Round] = []
    plug = speculate(drafter, num_speculative_tokens=nodes, on_round=rounds.append)
    return Way(name, {"custom_generate": plug}, rounds)


@dataclass(frozen=True)
class Run:
    """What one call gave and spent, in seconds."""

    tokens: Tensor  # (B, L) as `generate` returns them: without the prompt, padded on the right
    features: float
    encoder: float
    total: float
    passes: int  # of the model's decoder
    windows: int  # passes of its encoder
    rounds: int = 0  # those of all rows after the prompt's, in mmdec's loop
    drafted_tokens: int = 0  # the text of these rounds, bonus or correction included

    @property
    def decoder(self) -> float:
        return self.total - self.features - self.encoder

    @property
    def tokens_per_round(self) -> float:
        """Of mmdec's loop, a row's; 1 where there was no round after the prompt's."""
        return self.drafted_tokens / self.rounds if self.rounds else 1.0


@final
class Contest:
    """A model, and how it is asked."""

    def __init__(self, whisper: Whisper, language: str | None = "en", max_new_tokens: int | None = None) -> None:
        """language: of the recordings; None has it detected. A model of one language is not told."""
        self.whisper, self.model = whisper, whisper.model
        self.window: int = (
            whisper.extractor.n_samples
        )  # longer sound needs transformers' long-form code, and timestamps
        self.options: dict[str, Any] = {"do_sample": False, "num_beams": 1}
        if getattr(self.model.generation_config, "is_multilingual", False):
            self.options |= {"task": "transcribe"} if language is None else {"task": "transcribe", "language": language}
        if max_new_tokens is not None:
            self.options |= {"max_new_tokens": max_new_tokens, "max_length": None}

    def run(self, sounds: Sequence[Tensor], way: Way) -> Run:
        """Sounds (T,) of 16 kHz, decoded together. Where one is longer than a window, all get timestamps."""
        way.rounds.clear()
        encoders: list[nn.Module] = [self.model.model.encoder]
        for network in way.networks:
            if network.config.is_encoder_decoder:
                encoders.append(network.get_encoder())
        long = any(len(sound) > self.window for sound in sounds)
        more: dict[str, Any] = {"return_timestamps": True} if long else {}
        start = self._now()
        features = self._features(sounds, long)
        ready = self._now()
        with _quiet(), self._watched(encoders) as spent, _counted(self.model.model.decoder) as passes:
            tokens: Any = self.model.generate(**features, **self.options, **more, **way.options)
            end = self._now()
        later = [one for one in way.rounds if one.index]
        return Run(
            tokens=tokens,
            features=ready - start,
            encoder=sum(spent[encoders[0]]) + sum(sum(spent[other]) for other in encoders[1:]),
            total=end - start,
            passes=len(passes),
            windows=len(spent[encoders[0]]),
            rounds=sum(len(one.rows) for one in later),
            drafted_tokens=sum(len(row) for one in later for row in one.tokens),
        )

    def text(self, run: Run) -> list[str]:
        """Each row's text, special tokens and timestamps left out."""
        return [text.strip() for text in self.whisper.tokenizer.batch_decode(run.tokens, skip_special_tokens=True)]

    def _features(self, sounds: Sequence[Tensor], long: bool) -> dict[str, Tensor]:
        samples = [sound.numpy() for sound in sounds]
        options: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
        found = self.whisper.extractor(
            samples, sampling_rate=SAMPLE_RATE, return_tensors="pt", return_attention_mask=True, **options
        )
        return {name: found[name].to(self.model.device) for name in ("input_features", "attention_mask")}

    @contextmanager
    def _watched(self, modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, list[float]]]:
        """Seconds of each module's passes."""
        spent: dict[nn.Module, list[float]] = {module: [] for module in modules}
        starts: list[float] = []

        def before(_module: nn.Module, _args: Any) -> None:
            starts.append(self._now())

        def after(module: nn.Module, _args: Any, _out: Any) -> None:
            spent[module].append(self._now() - starts.pop())

        hooks = [one.register_forward_pre_hook(before) for one in modules]
        hooks += [one.register_forward_hook(after) for one in modules]
        try:
            yield spent
        finally:
            for hook in hooks:
                hook.remove()

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


@contextmanager
def _counted(module: nn.Module) -> Iterator[list[int]]:
    """One entry for each pass."""
    passes: list[int] = []
    hook = module.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """No advice from transformers: its lines at every step of some loops would be timed, too."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def has_heads(whisper: Whisper) -> bool:
    """Whether heads lie beside the model."""
    return whisper.directory is not None and (whisper.directory / HEADS / WEIGHTS).is_file()


def parse_plan(plan: str) -> Nodes:
    """ "learned", "8" for a chain of 8 nodes, "16x6" for a tree of 16 nodes at most 6 deep."""
    if plan == "learned":
        return None
    match = PLAN.fullmatch(plan)
    if match is None:
        raise InputError(f"`plan` must be 'learned', nodes of a chain or nodes x depth of a tree, but is {plan!r}.")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


def same(a: Run, b: Run, pad: int) -> list[bool]:
    """For each row whether two ways gave it the same tokens, padding aside."""
    return [_bare(x, pad) == _bare(y, pad) for x, y in zip(a.tokens.tolist(), b.tokens.tolist(), strict=True)]


def _bare(row: list[int], pad: int) -> list[int]:
    end = len(row)
    while end and row[end - 1] == pad:
        end -= 1
    return row[:end]
