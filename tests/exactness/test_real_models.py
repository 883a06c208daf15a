"""Compares `transcribe` with `model.generate` on real Whispers and recordings, for each option.

MMDEC_MODELS names a folder of Whisper folders, MMDEC_RECORDINGS one of recordings (`make real MODELS=FOLDER
RECORDINGS=FOLDER` sets both). Two recordings are decoded by default, all of them with MMDEC_ALL=1. Without these
variables the tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.core.tree import trees_from_lists
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.medusa.network import MedusaConfig, MedusaHeads
from mmdec.generation.auto_drafter import auto_drafter
from mmdec.hub.find import model_kind
from mmdec.io.audio import SAMPLE_RATE, load_audio
from mmdec.types import Context, Draft, Drafter, Needs, Plan, Scores, Target, Verdict
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.support.grid import WHOLE
from tests.support.random_drafter import RandomDrafter

SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
SHORT = 15.0  # seconds of the recordings that are decoded by default, at most
BATCH = 4
NOISE = 0.003  # of full scale


def folder(variable: str) -> list[Path]:
    """List the folder that the environment variable names."""
    named = os.environ.get(variable)
    return sorted(path for path in Path(named).iterdir() if path.name[0] != ".") if named else []


def seconds(path: Path) -> float:
    return len(load_audio(path)) / SAMPLE_RATE


MODELS = [path for path in folder("MMDEC_MODELS") if path.is_dir() and model_kind(path) == "whisper"]
FOUND = [path for path in folder("MMDEC_RECORDINGS") if path.suffix in SOUNDS]
RECORDINGS = FOUND if WHOLE else [path for path in FOUND if seconds(path) <= SHORT][:2]
pytestmark = pytest.mark.skipif(
    not (MODELS and RECORDINGS), reason="name real models and recordings: MMDEC_MODELS, MMDEC_RECORDINGS"
)

LADDER: dict[str, Any] = {
    "temperature": (0.0, 0.4, 0.8),
    "logprob_threshold": -0.4,
    "compression_ratio_threshold": 1.3,
    "no_speech_threshold": 0.6,
}
SILENT: dict[str, Any] = {"temperature": 0.0, "no_speech_threshold": 0.6, "logprob_threshold": -1.0}
CONDITIONED: dict[str, Any] = {"condition_on_prev_tokens": True, "temperature": 0.0}
SEGMENTS: dict[str, Any] = {"timestamps": "segment"}
WORDS: dict[str, Any] = {"timestamps": "word"}
WAYS: dict[str, dict[str, Any]] = {
    "given": {"language": "en"},
    "detected": {},
    "another language": {"language": "de", **SEGMENTS},
    "translated": {"language": "fr", "task": "translate"},
    "prompted": {"prompt": "A speech, and what came of it."},
    "segments": SEGMENTS,
    "words": WORDS,
    "conditioned": {**CONDITIONED, **SEGMENTS, "prompt": "A speech.", "prompt_condition_type": "all-segments"},
    "silence": SILENT,
    "silence, words": {**SILENT, **WORDS},
    "ladder": {**LADDER, **SEGMENTS},
}
TREES: dict[str, Any] = {"num_speculative_tokens": (12, 5)}  # in every round


class Joined:
    """The candidates of two drafters in one tree: tokens below the same path are one node."""

    name = "joined"

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.both = first, second
        layers = tuple(sorted({*first.needs.layers, *second.needs.layers}))
        encoder = first.needs.encoder or second.needs.encoder
        self.needs = Needs(layers, encoder=encoder, prior=first.needs.prior or second.needs.prior)

    def check(self, target: Target) -> None:
        for drafter in self.both:
            drafter.check(target)

    def start(self, context: Context) -> list[Any]:
        return [drafter.start(context) for drafter in self.both]

    def propose(self, state: list[Any], roots: Tensor, plan: Plan) -> Draft:
        half = replace(plan, nodes=max(plan.nodes // 2, 1), depth=min(plan.depth, max(plan.nodes // 2, 1)))
        nodes: list[dict[tuple[int, int], int]] = [{} for _ in roots]  # (parent, token) -> number
        for drafter, own in zip(self.both, state, strict=True):
            draft = drafter.propose(own, roots, half)
            rows = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.size.tolist(), strict=True)
            for known, (tokens, parents, size) in zip(nodes, rows, strict=True):
                places = [0]
                for token, parent in zip(tokens[1:size], parents[1:size], strict=True):
                    places.append(known.setdefault((places[parent], token), len(known) + 1))
        trees = [([token for _, token in known], [parent for parent, _ in known]) for known in nodes]
        return trees_from_lists(roots, trees)

    def update(self, state: list[Any], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for drafter, own in zip(self.both, state, strict=True):
            drafter.update(own, draft, scores, verdict)

    def select(self, state: list[Any], live: Tensor) -> None:
        for drafter, own in zip(self.both, state, strict=True):
            drafter.select(own, live)


def medusa(whisper: LoadedWhisper) -> MedusaDrafter:
    """Heads of random weights."""
    sizes: Any = whisper.model.config
    torch.manual_seed(1)
    heads = MedusaHeads(MedusaConfig(sizes.d_model, sizes.vocab_size, heads=4))
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return MedusaDrafter(heads, cast(Any, whisper.model).proj_out)


DRAFTERS: tuple[Callable[[LoadedWhisper], dict[str, Any]], ...] = (
    lambda _: {},
    lambda _: {"drafter": "recycling"},
    lambda _: {"drafter": None},
    lambda _: {"drafter": RandomDrafter(0), **TREES},
    lambda whisper: {"drafter": medusa(whisper), **TREES},
    lambda whisper: {"drafter": Joined(auto_drafter(whisper.model), medusa(whisper)), **TREES},
)


def stock(whisper: LoadedWhisper, samples: list[Tensor], way: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return each recording's segments by transformers' own loop."""
    model: Any = whisper.model
    extractor = whisper.extractor
    long = len(samples[0]) // extractor.hop_length > extractor.nb_max_frames
    more: dict[str, Any] = {"padding": "longest", "truncation": False} if long else {}
    features = extractor(
        [sample.numpy() for sample in samples],
        sampling_rate=SAMPLE_RATE,
        return_tensors="pt",
        return_attention_mask=True,
        **more,
    )
    options = {"task": "transcribe", **way}
    timed = options.pop("timestamps", None)
    if "prompt" in options:
        options["prompt_ids"] = whisper.tokenizer.get_prompt_ids(options.pop("prompt"), return_tensors="pt")
    if not model.generation_config.is_multilingual:
        options.pop("task")
    if timed == "word":
        options["return_token_timestamps"] = True
    torch.manual_seed(0)
    attention = model.config._attn_implementation
    try:
        out: Any = model.generate(
            **features, **options, return_timestamps=long or timed is not None, return_segments=True
        )
    finally:
        model.set_attn_implementation(attention)  # word timestamps leave "eager"
    return out["segments"]


def allowed(whisper: LoadedWhisper, way: dict[str, Any]) -> bool:
    settings: Any = whisper.model.generation_config
    return bool(getattr(settings, "is_multilingual", True)) or not {"language", "task"} & way.keys()


def check(result: mmdec.Transcript, expected: list[dict[str, Any]], timestamps: str | None) -> None:
    assert result.tokens == [token for segment in expected for token in segment["tokens"].tolist()]
    if timestamps == "segment":
        times = [
            min(round(float(segment[name]), 3), result.seconds) for segment in expected for name in ("start", "end")
        ]
        assert [time for segment in result.segments for time in (segment.start, segment.end)] == pytest.approx(times)
    if timestamps == "word":
        spoken = [
            time for segment in result.segments for word in segment.words or () for time in (word.start, word.end)
        ]
        assert spoken == sorted(spoken)
        assert all(0 <= time <= result.seconds for time in spoken)


@pytest.fixture(params=MODELS, ids=lambda path: path.name)
def whisper(request: pytest.FixtureRequest) -> Iterator[LoadedWhisper]:
    threads = torch.get_num_threads()
    yield load_whisper(request.param, "cpu")
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # transformers' own call
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_every_recording_equals_stock(whisper: LoadedWhisper, path: Path, name: str) -> None:
    """The same tokens and times, and each window is encoded once."""
    way = WAYS[name]
    if not allowed(whisper, way):
        pytest.skip("the model has one language")
    samples = load_audio(path)
    (expected,) = stock(whisper, [samples], way)
    passes = list[int]()
    hook = whisper.model.get_encoder().register_forward_hook(lambda *_: passes.append(1))
    drafter = DRAFTERS[(list(WAYS).index(name) + RECORDINGS.index(path)) % len(DRAFTERS)](whisper)
    try:
        torch.manual_seed(0)
        result = mmdec.transcribe(samples, sample_rate=SAMPLE_RATE, model=whisper, **drafter, **way)
    finally:
        hook.remove()
    check(result, expected, way.get("timestamps"))
    assert len(passes) <= result.windows


@pytest.mark.parametrize("name", ["detected", "segments"])
def test_batches_equal_single_recordings(whisper: LoadedWhisper, name: str) -> None:
    """Recordings of one window together, those that are longer together."""
    way, kinds = WAYS[name], dict[bool, list[Tensor]]()
    for path in RECORDINGS:
        samples = load_audio(path)
        kinds.setdefault(len(samples) > 30 * SAMPLE_RATE, []).append(samples)
    for group in kinds.values():
        for at in range(0, len(group), BATCH):
            batch = group[at : at + BATCH]
            expected = stock(whisper, batch, way)
            arrays: Any = [samples.numpy() for samples in batch]
            result = mmdec.transcribe(arrays, sample_rate=SAMPLE_RATE, model=whisper, batch_size=BATCH, **way)
            for transcript, theirs in zip(result, expected, strict=True):
                check(transcript, theirs, way.get("timestamps"))


@pytest.mark.parametrize("length", [0.1, 5.0, 30.0, 30.01])
def test_recordings_without_speech_equal_stock(whisper: LoadedWhisper, length: float) -> None:
    """The recordings hold noise, and are as long as a window, shorter or longer."""
    generator = torch.Generator().manual_seed(0)
    samples = NOISE * torch.randn(int(length * SAMPLE_RATE), generator=generator)
    (expected,) = stock(whisper, [samples], WAYS["segments"])
    check(mmdec.transcribe(samples, sample_rate=SAMPLE_RATE, model=whisper, timestamps="segment"), expected, "segment")


@pytest.mark.parametrize("name", ["detected", "words"])
def test_live_text_equals_transcribe(whisper: LoadedWhisper, name: str) -> None:
    """Recordings with pauses between them, as they arrive: final text is that of the same cut, and what provisional
    text has told before saves passes."""
    pause = NOISE / 10 * torch.randn(2 * SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    sound = torch.cat([part for path in RECORDINGS for part in (pause, load_audio(path))] + [pause])
    options: dict[str, Any] = {"model": whisper, **WAYS[name]}
    chunks = (sound[at : at + SAMPLE_RATE // 2] for at in range(0, len(sound), SAMPLE_RATE // 2))
    finals = [update for update in mmdec.transcribe_stream(chunks, every=2.0, **options) if update.final]
    assert len(finals) >= len(RECORDINGS)
    passes = [0, 0]
    for update in finals:
        cut = sound[round(update.start * SAMPLE_RATE) : round(update.end * SAMPLE_RATE)]
        expected = mmdec.transcribe(cut, sample_rate=SAMPLE_RATE, drafter=None, **options)
        assert update.transcript.tokens == expected.tokens
        assert update.transcript.segments == expected.segments
        passes = [passes[0] + update.transcript.rounds, passes[1] + expected.rounds]
    assert passes[0] < passes[1]
