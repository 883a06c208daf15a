"""Ways to call a tiny Whisper, its results without drafts, and drafters that know these results."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

import mmdec
from mmdec.core.tree import trees_from_lists
from mmdec.drafters.ctc.drafter import CtcDrafter
from mmdec.drafters.ctc.network import CtcHead, CtcHeadConfig
from mmdec.drafters.ctc.tokens import Merges, TokenPieces
from mmdec.drafters.medusa.network import HeadKind, MedusaConfig, MedusaHeads
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict
from tests.support.tiny_whisper import (
    EOT,
    NO_TIMESTAMPS,
    PREVIOUS,
    SOT,
    TEXT,
    TIMESTAMPS,
    VOCABULARY,
    medusa_heads,
    sound,
    whisper,
)

MODELS = {80: whisper(80, 9), 128: whisper(128, 1)}  # seeds for which some windows end before the limit
PROMPT = torch.tensor([PREVIOUS, 5, 6, 7, 24, 24])
LONG = 3.4  # length of a long recording, in windows; random timestamps make some parts be decoded twice


@dataclass(frozen=True)
class Mode:
    """One way to call `generate`."""

    windows: float = 1.0  # length of the recording
    options: dict[str, Any] = field(default_factory=dict)  # arguments of `generate`


PLAIN: dict[str, Any] = {  # no timestamps: random weights would write some
    "suppress_tokens": [1, 2, *range(SOT, NO_TIMESTAMPS), *range(TIMESTAMPS, VOCABULARY)]
}
SPOKEN: dict[str, Any] = {"language": "en", "return_timestamps": True, "return_segments": True}
MODES = {
    "short": Mode(options=PLAIN | {"language": "en", "max_new_tokens": 40}),
    "detected": Mode(options=PLAIN),
    "translated": Mode(options=PLAIN | {"language": "de", "task": "translate", "repetition_penalty": 1.2}),
    "prompted": Mode(options=PLAIN | {"language": "fr", "prompt_ids": PROMPT}),
    "words": Mode(options=SPOKEN | {"return_token_timestamps": True}),
    "long": Mode(LONG, SPOKEN),
    "conditioned": Mode(
        LONG,
        SPOKEN
        | {
            "condition_on_prev_tokens": True,
            "prompt_ids": PROMPT,
            "prompt_condition_type": "all-segments",
            "temperature": 0.0,
        },
    ),
    "thresholds": Mode(
        LONG,
        SPOKEN
        | {
            "temperature": (0.0,),
            "logprob_threshold": -0.3,
            "compression_ratio_threshold": 1.1,
            "no_speech_threshold": 1e-4,
        },
    ),
}


def heads(kind: HeadKind, seed: int = 0, **sizes: Any) -> MedusaHeads:
    defaults = {"hidden_size": 32, "vocab_size": VOCABULARY, "heads": 4}
    return medusa_heads(MedusaConfig(**{**defaults, **sizes}, **SHAPES[kind]), seed)


SHAPES: dict[str, Any] = {
    "linear": {"kind": "linear"},
    "block": {"kind": "block", "attention_heads": 2, "ffn": 48},
}


@dataclass
class Known:
    """The state of a `KnownTextDrafter` in one run."""

    texts: list[list[int]]  # each row's text after the prompt
    places: list[int]  # number of its tokens that are decoded already


class KnownTextDrafter:
    """A drafter that is given the texts of all windows and is always right, or always wrong (`right` False). bushy: put
    a wrong sibling before each right node."""

    needs = Needs()

    def __init__(self, windows: list[Tensor], right: bool, bushy: bool) -> None:
        self.name, self.windows, self.right, self.bushy = "known text", list(windows), right, bushy

    def check(self, target: Target) -> None: ...

    def start(self, context: Context) -> Known:
        rows, prompt = self.windows.pop(0), context.tokens
        assert torch.equal(rows[:, : prompt.shape[1]], prompt)
        return Known(rows[:, prompt.shape[1] :].tolist(), [0] * len(rows))

    def propose(self, state: Known, roots: Tensor, plan: Plan) -> Draft:
        trees = []
        for text, place in zip(state.texts, state.places, strict=True):
            tail = text[place : place + plan.depth]
            tokens, parents, node = list[int](), list[int](), 0
            for token in tail:
                if self.bushy and len(tokens) + 1 < plan.nodes:  # a sibling before it that is wrong
                    tokens.append((token + 1) % TEXT)
                    parents.append(node)
                if len(tokens) == plan.nodes:
                    break
                tokens.append(token if self.right else (token + 2) % TEXT)
                parents.append(node)
                node = len(tokens)
            trees.append((tokens, parents))
        return trees_from_lists(roots, trees)

    def update(self, state: Known, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        state.places = [place + length for place, length in zip(state.places, verdict.lengths.tolist(), strict=True)]

    def select(self, state: Known, live: Tensor) -> None:
        state.texts = [state.texts[row] for row in live.tolist()]
        state.places = [state.places[row] for row in live.tolist()]


def call(network: WhisperForConditionalGeneration, mode: Mode, batch: int, **more: Any) -> Any:
    torch.manual_seed(0)
    options = {"max_new_tokens": 14, "max_length": None, **mode.options, **more}
    return network.generate(**sound(batch, mode.windows, network.config.num_mel_bins, batch), **options)


@lru_cache
def stock(mels: int, mode: str, batch: int, attention: str) -> Any:
    return call(MODELS[mels], MODES[mode], batch)


@lru_cache
def windows(mels: int, mode: str, batch: int) -> list[Tensor]:
    """Return the ids that transformers' own loop gave for each window."""
    texts = []

    def listen(model: Any, input_ids: Tensor, **given: Any) -> Any:
        out = model._sample(input_ids, **given)
        texts.append(out if isinstance(out, Tensor) else out.sequences)
        return out

    call(MODELS[mels], MODES[mode], batch, custom_generate=listen)
    return texts


def plug(drafter: Any, nodes: Any, **more: Any) -> Any:
    """Make a `custom_generate` function. nodes: of a chain, or (nodes, depth) of a tree."""
    return mmdec.speculate(drafter, num_speculative_tokens=nodes, **more)


def assert_same(result: Any, expected: Any) -> None:
    """Assert that two results of `generate` are equal: tensors, or dicts and lists of them."""
    assert type(result) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(result.nan_to_num(-1), expected.nan_to_num(-1))
    elif isinstance(expected, dict):
        assert result.keys() == expected.keys()
        for name in expected:
            if name != "result":
                assert_same(result[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(result) == len(expected)
        for part, expected_part in zip(result, expected, strict=True):
            assert_same(part, expected_part)
    else:
        assert result == expected


def ctc(kind: str, seed: int = 0, d_states: int = 32) -> CtcDrafter:
    """Build a CTC drafter with a random head.

    kind: "babbling": the head outputs a piece of text in every frame; "random": in some frames; "marks": it
        outputs only blanks and segment ends.
    Tokens 0 to 39 are bytes; each of those up to 59 is two other tokens joined.
    """
    generator = torch.Generator().manual_seed(seed)
    alphabet = [value - 64 if 64 <= value < 104 else -1 for value in range(256)]
    rows = [(*torch.randint(0, token, (2,), generator=generator).tolist(), token) for token in range(40, TEXT)]
    pieces = TokenPieces(Merges(rows, alphabet), sorted(torch.randperm(TEXT, generator=generator)[:30].tolist()))
    torch.manual_seed(seed)
    head = CtcHead(CtcHeadConfig(d_states, len(pieces), 1, 16, 1, 3))
    with torch.no_grad():
        head.output.weight.mul_(20)
        head.output.bias[:2] += {"babbling": torch.tensor([-99.0, -9]), "marks": torch.tensor([9.0, 9])}.get(kind, 0.0)
    return CtcDrafter(head, pieces, TIMESTAMPS, EOT)
