"""Runs the networks of a French-to-English speech translator in order, and measures their time.

The order is: features, encoder, linguistic decoder (a path through the graph, or the autoregressive decoder), words,
acoustic model, vocoder. Each pass of the linguistic decoder, and its graph, can be reported to the caller (`Pass`).
`layouts.py` holds the differences between translators of phones and of word pieces; `translate.py` does loading, files
and long recordings.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from mmdec.checks.arguments import show
from mmdec.core.budget import Budget
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.timing import Stopwatch
from mmdec.core.verify import MatchRule
from mmdec.daspeech.ar_decoder import ArDecoder
from mmdec.daspeech.checkpoint import DASpeechParts, save_parts
from mmdec.daspeech.checkpoint_files import AUTOREGRESSIVE_STRATEGIES, GRAPH_STRATEGIES, STRATEGIES
from mmdec.daspeech.dag_decoder import BOS, Lattice
from mmdec.daspeech.dag_drafter import DagDrafter
from mmdec.daspeech.layouts import Layout, layout_of, pad
from mmdec.daspeech.model import DASpeech, EncodedSpeech
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts
from mmdec.daspeech.target import EOS, PAD, UnitTarget
from mmdec.errors import InputError
from mmdec.generation.model_lock import reading
from mmdec.hub.publish import push_folder
from mmdec.kernels.dag_decode import LatticePath
from mmdec.tasks.confidence import UNCERTAINTY_OFFSET, Calibration, estimate_confidence, token_evidence

__all__ = ["GRAPH_STRATEGIES", "STAGES", "SpeechTranslator", "SpokenTranslation", "check_strategy", "total_timings"]

STAGES = ("features", "encoder", "linguistic", "confidence", "acoustic", "vocoder", "words")
GPU_ROWS = 16  # maximum rows of a padded batch on a GPU
RERANKED_TEXTS = 8  # for "reranked": number of the graph's best texts that the autoregressive decoder scores
DRAFT_NODES = 192  # maximum nodes of a draft that is made from the graph: an utterance's units and their alternatives

GRAPH_KIND, AUTOREGRESSIVE_KIND = "graph", "autoregressive"  # kinds of decoding in confidence.json

EvidenceRows = list[dict[str, float]]
Decoder = Callable[[Tensor, Tensor, Tensor], Tensor]
# the autoregressive decoder's scores of one text: ln P of each unit and of </s>; for each, whether it is the decoder's
# first choice
TextScores = tuple[list[float], list[bool]]
# for each row: unit ids; the graph's states (K + 1, D) at its K units and </s>; number of passes; evidence for the
# confidence
_Decoded = tuple[list[list[int]], list[Tensor] | None, list[int], EvidenceRows]
NUM_SPECIAL_UNITS = 4  # the first four units of every vocabulary are special: <s> <pad> </s> <unk>


@dataclass(frozen=True)
class Graph:
    """The graph decoder's output for one utterance, on the CPU."""

    emissions: Tensor = field(repr=False)  # (L, V) log-probabilities of V units at L vertices
    # (L, L) log-probabilities of links from vertex i (row) to j (column); -inf: no link
    links: Tensor = field(repr=False)
    units: list[str] = field(repr=False)  # names of the V units, ordered by id
    path: list[int]  # vertices on the chosen path, in order; empty if the graph only makes drafts
    chosen: list[str]  # the unit at each vertex on the path, <s> and </s> included


@dataclass(frozen=True)
class Pass:
    """One pass of a decoder, as it is reported to the caller.

    It makes units final, except for the strategy "verified", in which the graph's pass only drafts units.
    """

    piece: int  # index of the recording's segment; long recordings are cut into segments at pauses
    units: list[str]  # names of the units that this pass made final, in order
    tokens: int  # number of units that this pass made final, special ones such as </s> included
    seconds: float  # seconds since decoding of the segment began, without the time spent in `on_pass`
    graph: Graph | None = None  # the graph that this pass predicted; None for a pass of the autoregressive decoder


OnPass = Callable[[Pass], None]


@final
class PassListener:
    """Reports the decoder passes of one utterance to the callback `on_pass`, with their times.

    Without a callback it does nothing.
    """

    def __init__(self, on_pass: OnPass | None, piece: int, units: Sequence[str], device: torch.device) -> None:
        self._on_pass, self._piece, self._units = on_pass, piece, list(units)
        self._stopwatch, self._seconds = Stopwatch(device), 0.0
        self.limit: int | None = None  # maximum number of units to report, because a decoder may run one step more
        # Whether the text has ended. On a GPU the decoder checks this only now and then, so it may report a few more
        # steps after the end; they are ignored.
        self._ended = False

    def tokens(self, tokens: Sequence[int], graph: Graph | None = None) -> None:
        """Report a pass that made these unit ids final, special ones included.

        Args:
            graph: The graph that the pass predicted, or None.
        """
        if self._on_pass is None:
            return
        self._seconds += self._stopwatch.lap()
        if self.limit is not None:
            tokens = tokens[: self.limit]
            self.limit -= len(tokens)
        units = [self._units[token] for token in tokens if token >= NUM_SPECIAL_UNITS]
        self._on_pass(Pass(self._piece, units, len(tokens), self._seconds, graph))
        self._stopwatch.lap()

    def step(self, tokens: Tensor) -> None:
        """Report one step of `ArDecoder.generate`, which calls this function.

        Args:
            tokens: (1,), the step's unit. Steps after the row's end are skipped.
        """
        if self._on_pass is not None and not self._ended:
            token = int(tokens)
            self._ended = token in (EOS, PAD)
            self.tokens([token])

    def graph(
        self, emissions: Tensor, links: Tensor, tokens: Tensor | None = None, vertices: Tensor | None = None
    ) -> None:
        """Report the graph of one row.

        Args:
            emissions: (L, V) log-probabilities of V units at L vertices.
            links: (L, L) log-probabilities.
            tokens: (K,), unit of each step of the chosen path, padded with -1; the units are final. None: no path.
            vertices: (K,), vertex of each of these steps, padded with -1.
        """
        if self._on_pass is None:
            return
        chosen = [] if tokens is None else [token for token in tokens.tolist() if token >= 0]
        path = [] if vertices is None else [vertex for vertex in vertices.tolist() if vertex >= 0]
        names = [self._units[token] for token in chosen]
        self.tokens(chosen, Graph(emissions.cpu(), links.cpu(), self._units, path, names))


def score_texts(decoder: Decoder, tokens: Sequence[Sequence[int]], source: EncodedSpeech) -> list[TextScores]:
    """Score the units of each row in one pass of the autoregressive decoder.

    Args:
        decoder: Function: (units (B, M), encoder states, their lengths) -> logits (B, M, V).
        tokens: Unit ids of each row.
        source: The encoded recordings.

    Returns:
        For each row the ln P of its units and of </s>, and whether each is the decoder's first choice.
    """
    rows = [torch.tensor([BOS, *row, EOS], device=source.states.device) for row in tokens]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    logprobs = decoder(padded[:, :-1], source.states, source.lengths).float().log_softmax(-1)
    scores = logprobs.gather(2, padded[:, 1:, None])[..., 0].tolist()
    is_first_choice = (logprobs.argmax(-1) == padded[:, 1:]).tolist()
    sizes = [len(row) + 1 for row in tokens]
    return [(row[:size], firsts[:size]) for row, firsts, size in zip(scores, is_first_choice, sizes, strict=True)]


def autoregressive_evidence(scores: TextScores) -> dict[str, float]:
    """Compute evidence from the autoregressive decoder's scores of one text.

    It consists of the log-probabilities of the units, and the share of units for which this decoder prefers another
    unit.

    Args:
        scores: The scores of one text, from `score_texts`.
    """
    logprobs, is_first_choice = scores
    share = sum(is_first_choice) / len(is_first_choice)
    return token_evidence(logprobs) | {"differs": math.log(1 - share + UNCERTAINTY_OFFSET)}


def path_evidence(scores: Tensor, lengths: Tensor) -> EvidenceRows:
    """Compute evidence from the graph's path.

    Args:
        scores: (B,), ln P of each row's path.
        lengths: (B,), the path's number of vertices.
    """
    means: list[float] = (-scores / lengths).clamp(0, 30).tolist()
    return [{"graph": math.log(mean + UNCERTAINTY_OFFSET)} for mean in means]


def vertex_evidence(emissions: Tensor, vertices: Tensor, tokens: Tensor) -> EvidenceRows:
    """Compute evidence from the graph's probabilities of the units on each row's path.

    Args:
        emissions: (B, L, V) log-probabilities of V units at L vertices.
        vertices: (B, K), vertex of each of the path's K steps, padded with -1.
        tokens: (B, K), unit of each of these steps, padded with -1.
    """
    rows = zip(emissions, vertices, tokens, strict=True)
    return [token_evidence(row[path[units >= 0], units[units >= 0]].tolist()) for row, path, units in rows]


def head_evidence(source: EncodedSpeech) -> EvidenceRows:
    """Compute evidence from the CTC head; {} for each row without a head.

    It has three parts: the head's probabilities of the transcript's pieces; its probabilities of the best piece or
    blank at each frame; and the number of pieces per frame, which is unusual for other languages and noise.
    """
    transcripts = source.transcripts
    if transcripts is None:
        return [{} for _ in source.limits]
    evidence: EvidenceRows = []
    pieces: Tensor = transcripts.weights[..., 0].clamp(min=1e-12).log()
    rows = (pieces.tolist(), transcripts.lengths.tolist(), transcripts.logprobs.tolist(), transcripts.counts.tolist())
    for piece_logprobs, count, logprobs, frames in zip(*rows, strict=True):
        uncertainty = -sum(logprobs[:frames]) / max(frames, 1)
        evidence.append(
            token_evidence(piece_logprobs[:count], "heard_")
            | {"frames": math.log(uncertainty + UNCERTAINTY_OFFSET), "rate": math.log(max(count, 1) / max(frames, 1))}
        )
    return evidence


@dataclass(frozen=True)
class SpokenTranslation:
    """The translation of one utterance: English text and speech."""

    text: str
    units: list[str]  # names of its phones or word pieces
    samples: Tensor  # (T,) float32 on the CPU, the English speech at 16 kHz
    timings: dict[str, float]  # stage -> seconds; the time of a batch is divided equally among its utterances
    passes: int = 1  # number of passes of the decoder that wrote the units
    confidence: float = 0.0  # in [0, 1]: expected share of right words
    # the values from which the confidence was computed
    evidence: Mapping[str, float] = field(default_factory=lambda: {})


class SpeechTranslator:
    """A French-to-English speech translator.

    Its networks and tables do not change, so several callers may share it. The attribute `vocoder` maps (mel (B, F,
    80), lengths (B,)) to samples (B, F * 256), like `Vocoder`.

    Args:
        parts: The networks and tables.
        calibrations: Kind of decoding -> calibration of the confidence; None: use token probabilities.
        dtype: Dtype of matrix products. The vocoder always uses float32, because bfloat16 would make its sound noisy.
    """

    def __init__(
        self,
        parts: DASpeechParts | PieceTranslatorParts,
        calibrations: Mapping[str, Calibration] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        self.parts, self.calibrations = parts, calibrations or {}
        self.networks = tuple(network.eval() for network in parts.networks)
        self.model, self.vocoder = parts.model, parts.vocoder
        self.layout: Layout = layout_of(parts)
        self.units, self.decoding, self.name = parts.units, parts.decoding, parts.name

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return next(self.model.parameters()).device

    @property
    def baseline(self) -> ArDecoder:
        """The autoregressive decoder.

        Raises:
            InputError: For a model that has none.
        """
        return self.model.baseline if isinstance(self.model, DASpeech) else self.model.ar

    def save_pretrained(self, directory: str | os.PathLike[str]) -> Path:
        """Write the model's folder. If writing fails, an existing folder is not changed.

        The model card, calibrations and provenance are copied only if the weights were not changed.

        Raises:
            InputError: For a vocoder that is not the model's own, or if the folder holds other files.
        """
        return save_parts(directory, self.parts)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the model's folder to the hub.

        Returns:
            The commit's address.

        Raises:
            InputError: If the upload fails.
        """
        with tempfile.TemporaryDirectory(prefix="mmdec-push-") as folder:
            return push_folder(self.save_pretrained(Path(folder) / self.name), repo_id, private=private, token=token)

    def translate(
        self, samples: Sequence[Tensor], strategy: str | None = None, on_pass: OnPass | None = None
    ) -> list[SpokenTranslation]:
        """Translate utterances, in order.

        On a CPU, utterances are processed one by one, so a batch gives exactly the same results as single calls. On a
        GPU, utterances are padded into groups, whose time is divided equally among their rows. With `on_pass`,
        utterances are processed one by one on every device.

        Args:
            samples: 16 kHz samples (T,) of each utterance.
            strategy: None: the model's own. "verified" gives the autoregressive decoder's greedy output in fewer
                passes: the graph drafts, the autoregressive decoder verifies. "reranked" takes the graph's best text by
                both decoders' scores.
            on_pass: Called after each pass of the linguistic decoder.
        """
        strategy = self.supported_strategy(strategy)
        with reading(*self.networks):  # the model must not change between two groups
            rows = 1 if self.device.type == "cpu" or on_pass is not None else GPU_ROWS
            groups = [samples[start : start + rows] for start in range(0, len(samples), rows)]
            return [
                result
                for index, group in enumerate(groups)
                for result in self.translate_batch(group, strategy, on_pass, index)
            ]

    def supported_strategy(self, strategy: str | None) -> str:
        """Return the strategy, or for None the model's own.

        Raises:
            InputError: If the model does not support it.
        """
        if strategy is None:
            return self.decoding.strategy
        check_strategy(strategy)
        if strategy != "autoregressive" and self.model.decoder is None:
            raise InputError(
                f"`strategy` must be autoregressive for '{self.name}', which has no graph, but is {show(strategy)}. "
                "Choose that one."
            )
        if strategy in AUTOREGRESSIVE_STRATEGIES and self.model.ar is None:
            raise InputError(
                f"`strategy` must be one of {', '.join(GRAPH_STRATEGIES)} for '{self.name}', which has no "
                f"autoregressive decoder, but is {show(strategy)}. Choose one of these."
            )
        return strategy

    @torch.inference_mode()
    def translate_batch(
        self, samples: Sequence[Tensor], strategy: str, on_pass: OnPass | None = None, piece: int = 0
    ) -> list[SpokenTranslation]:
        """Translate one padded batch (on a CPU a single utterance). The caller must hold the model's lock.

        The units of a row are the same as without the batch; its samples differ only by rounding.

        Args:
            samples: 16 kHz samples (T,) of each utterance.
            strategy: The decoding strategy.
            on_pass: Only for a batch of one utterance.
            piece: Index of this utterance, which `on_pass` gets.
        """
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self._translate_batch(samples, strategy, on_pass, piece)

    def _translate_batch(
        self, samples: Sequence[Tensor], strategy: str, on_pass: OnPass | None, piece: int
    ) -> list[SpokenTranslation]:
        clock = Stopwatch(self.device)
        with clock.stage("features"), torch.autocast(self.device.type, enabled=False):
            features = self.layout.features(samples)
        with clock.stage("encoder"):
            source = self.layout.source(features)
        rows: list[int] = source.lengths.nonzero()[:, 0].tolist()  # those with a transcript
        if len(rows) < len(samples):
            source = source.select(rows)
        listener = PassListener(on_pass, piece, self.units, self.device)
        translations = self._translate_rows(source, strategy, listener, clock) if rows else []
        timings = {stage: clock.seconds.get(stage, 0.0) / len(samples) for stage in STAGES}
        results = [SpokenTranslation("", [], torch.zeros(0), dict(timings), passes=0) for _ in samples]
        for row, result in zip(rows, translations, strict=True):
            results[row] = replace(result, timings=dict(timings))
        return results

    def _translate_rows(
        self, source: EncodedSpeech, strategy: str, listener: PassListener, clock: Stopwatch
    ) -> list[SpokenTranslation]:
        """Translate each row: text, units and speech, without timings.

        Args:
            source: The encoded recordings; no row may be empty.
            listener: Reports the passes.
            clock: Measures the stages.
        """
        with clock.stage("linguistic"):
            kind = AUTOREGRESSIVE_KIND if strategy in ("autoregressive", "verified") else GRAPH_KIND
            run = {"autoregressive": self._decode_autoregressive, "verified": self._decode_verified}.get(
                strategy, self._decode_graph
            )
            tokens, hidden, passes, evidence = run(source, strategy, listener)
        with clock.stage("confidence"):
            if strategy == "autoregressive" and self.model.decoder is not None:
                evidence = self._graph_evidence(self.model.lattice(source.states, source.lengths, source.sizes))
            if self.model.ar is not None and strategy != "reranked":
                scores = score_texts(self.model.ar, tokens, source)
                evidence = [row | autoregressive_evidence(one) for row, one in zip(evidence, scores, strict=True)]
            evidence = [row | new for row, new in zip(evidence, head_evidence(source), strict=True)]
            confidences = [estimate_confidence(row, self.calibrations, kind) for row in evidence]
        with clock.stage("words"):
            texts = self.layout.texts(tokens)
        with clock.stage("acoustic"):
            mels = self.layout.mels(tokens, texts, hidden)
        with clock.stage("vocoder"):
            voices = self._voice(mels)
        units = [[self.units[token] for token in row] for row in tokens]
        rows = zip(texts, units, voices, passes, confidences, evidence, strict=True)
        return [
            SpokenTranslation(text, names, voice, timings={}, passes=count, confidence=confidence, evidence=values)
            for text, names, voice, count, confidence, values in rows
        ]

    def _decode_autoregressive(self, source: EncodedSpeech, strategy: str, listener: PassListener) -> _Decoded:
        listener.limit = source.limits[0]
        rows = self.baseline.generate(source.states, source.lengths, max(source.limits), on_step=listener.step)
        return _cut_to_limits(rows, source.limits), None, [len(row) + 1 for row in rows], [{} for _ in rows]

    def _decode_verified(self, source: EncodedSpeech, strategy: str, listener: PassListener) -> _Decoded:
        """Decode the units of `ArDecoder.generate` in fewer passes: the graph drafts, the decoder verifies."""
        listener.limit = source.limits[0]
        lattice = self.model.lattice(source.states, source.lengths, source.sizes)
        listener.graph(lattice.emissions[0], lattice.links[0])
        drafter = DagDrafter(lattice.emissions, lattice.links, lattice.lengths, EOS)
        target = UnitTarget(self.baseline)
        drafter.check(target)
        prompt = torch.full((len(source.states), 1), BOS, device=self.device)
        # the same limit and end tokens as in `ArDecoder.generate`, so that the units are the same
        stop = Stop(max(source.limits) + 1, frozenset({EOS, PAD}))
        text = Sequences(prompt, stop)
        inputs = {"states": source.states, "state_lengths": source.lengths}
        passes = [0] * len(source.states)
        for round_ in decode(target, inputs, text, MatchRule(), drafter, Budget.fixed(DRAFT_NODES)):
            for row in round_.rows:
                passes[row] += 1
            listener.tokens(round_.tokens[0])
        rows = [row[:-1] if row[-1] in (EOS, PAD) else row for row in text.tokens]
        return _cut_to_limits(rows, source.limits), None, passes, self._graph_evidence(lattice)

    def _decode_graph(self, source: EncodedSpeech, strategy: str, listener: PassListener) -> _Decoded:
        lattice = self.model.lattice(source.states, source.lengths, source.sizes)
        path, scores = self._path(lattice, strategy), []
        if strategy == "reranked":
            path, scores = self._rerank(path, source)
        listener.graph(lattice.emissions[0], lattice.links[0], path.tokens[0], path.vertices[0])
        keep, tokens = _spoken_units(path)
        spoken = [torch.cat([steps, last[None]]) for steps, last in zip(keep, path.lengths - 1, strict=True)]
        hidden = [
            states[vertices[steps]]
            for states, vertices, steps in zip(lattice.hidden, path.vertices, spoken, strict=True)
        ]
        evidence = path_evidence(path.scores, path.lengths)
        if scores:
            evidence = [row | autoregressive_evidence(one) for row, one in zip(evidence, scores, strict=True)]
        # there is no autoregressive decoder to score the text, so the graph's probabilities are used
        if self.model.ar is None:
            vertices = vertex_evidence(lattice.emissions, path.vertices, path.tokens)
            evidence = [row | new for row, new in zip(evidence, vertices, strict=True)]
        return tokens, hidden, [2 if strategy == "reranked" else 1] * len(tokens), evidence

    def _graph_evidence(self, lattice: Lattice) -> EvidenceRows:
        """Compute evidence for an autoregressive text from the path that the graph itself would choose."""
        guided = getattr(self.model, "english_ngram", None) is not None
        path = self._path(lattice, "beam" if guided else "lookahead")
        return path_evidence(path.scores, path.lengths)

    def _path(self, lattice: Lattice, strategy: str) -> LatticePath:
        """Find each row's path through the graph. For "reranked": several paths for each row, one after the other."""
        if strategy in ("beam", "reranked"):
            count = RERANKED_TEXTS if strategy == "reranked" else 1
            return lattice.beam(getattr(self.model, "english_ngram", None), self.decoding.collapse, count)
        return lattice.path(
            strategy,
            lookahead_weight=self.decoding.lookahead_weight,
            length_penalty=self.decoding.length_penalty,
            collapse=self.decoding.collapse,
        )

    def _rerank(self, paths: LatticePath, source: EncodedSpeech) -> tuple[LatticePath, list[TextScores]]:
        """Choose the best of several paths for each row.

        It is the one with the highest sum of beam search score and ln P of its text by the autoregressive decoder,
        which scores all texts in one pass.

        Returns:
            The chosen paths, and the decoder's scores of their texts.

        References:
            Gu et al. 2018, "Non-autoregressive neural machine translation", section 4.2: noisy parallel decoding.
        """
        rows = len(source.states)
        count = len(paths.scores) // rows
        _, texts = _spoken_units(paths)
        repeated = source.select([row for row in range(rows) for _ in range(count)])
        assert paths.beams is not None  # only for type checkers: a beam search always sets `beams`
        scores = score_texts(self.baseline, texts, repeated)
        totals = paths.beams + paths.beams.new_tensor([sum(logprobs) for logprobs, _ in scores])
        best = torch.arange(rows, device=totals.device) * count + totals.view(rows, count).argmax(-1)
        return paths.select(best), [scores[row] for row in best.tolist()]

    def _voice(self, mels: list[Tensor]) -> list[Tensor]:
        """Convert log mels (F, 80) of each utterance to samples (T,) on the CPU, within [-1, 1]."""
        spoken = [row for row, mel in enumerate(mels) if len(mel)]
        voices = [torch.zeros(0) for _ in mels]
        if spoken:
            batch, lengths = pad([mels[row] for row in spoken], self.device)
            with torch.autocast(self.device.type, enabled=False):
                samples = self.vocoder(batch.float(), lengths).float().clamp(-1, 1).cpu()
            for row, voice, length in zip(spoken, samples, lengths.tolist(), strict=True):
                voices[row] = voice[: self.parts.mels.samples(length)]
        return voices


def _spoken_units(paths: LatticePath) -> tuple[list[Tensor], list[list[int]]]:
    """Return for each path the indices (N,) of the steps that emit a unit that is not special, and these units' ids."""
    keep = [row.nonzero()[:, 0] for row in paths.tokens >= NUM_SPECIAL_UNITS]  # padding is -1
    return keep, [row[steps].tolist() for row, steps in zip(paths.tokens, keep, strict=True)]


def _cut_to_limits(rows: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Cut each translation (a list of unit ids) to its maximum length, and remove special units.

    Args:
        limits: The maximum number of units of each.
    """
    return [
        [token for token in row[:limit] if token >= NUM_SPECIAL_UNITS] for row, limit in zip(rows, limits, strict=True)
    ]


def check_strategy(strategy: str) -> None:
    """Raise InputError for an unknown strategy."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise InputError(
            f"`strategy` must be one of {', '.join(STRATEGIES)}, but is {show(strategy)}. Choose one of these."
        )


def total_timings(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum the seconds of each stage over several utterances."""
    return {stage: sum(part[stage] for part in parts) for stage in STAGES}
