"""Runs the networks of a French-to-English speech translator in order, and measures their time.

The order is: features, encoder, linguistic decoder (a path through the graph, or the autoregressive decoder), words,
acoustic model, vocoder. `passes.py` reports each pass of the linguistic decoder, and its graph, to the caller.
`layouts.py` holds the differences between translators of phones and of word pieces; `translate.py` does loading, files
and long recordings.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from mmdec.checks.arguments import check_choice, format_value
from mmdec.core.budget import FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.timing import Stopwatch
from mmdec.core.verify import MatchRule
from mmdec.daspeech.ar_decoder import rows_of_steps
from mmdec.daspeech.checkpoint import DASpeechParts, save_parts
from mmdec.daspeech.dag_decoder import Lattice
from mmdec.daspeech.dag_drafter import DagDrafter
from mmdec.daspeech.evidence import (
    EvidenceRows,
    TextScores,
    autoregressive_evidence,
    head_evidence,
    path_evidence,
    score_texts,
    vertex_evidence,
)
from mmdec.daspeech.layouts import Layout, layout_of, pad
from mmdec.daspeech.model import EncodedSpeech
from mmdec.daspeech.options import AUTOREGRESSIVE_OUTPUT, GRAPH_STRATEGIES, STRATEGIES, STRATEGIES_WITH_AR_DECODER
from mmdec.daspeech.passes import OnPass, PassListener
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts
from mmdec.daspeech.target import UnitTarget
from mmdec.daspeech.units import BOS, EOS, NUM_SPECIAL_UNITS, PAD
from mmdec.errors import InputError
from mmdec.generation.model_lock import reading
from mmdec.hub.publish import push_folder
from mmdec.kernels.dag_decode import LatticePath
from mmdec.tasks.confidence import Calibration, estimate_confidence

STAGES = ("features", "encoder", "linguistic", "confidence", "acoustic", "vocoder", "words")
GPU_ROWS = 16  # maximum rows of a padded batch on a GPU
RERANKED_TEXTS = 8  # for "reranked": number of the graph's best texts that the autoregressive decoder scores
DRAFT_NODES = 192  # maximum nodes of a draft that is made from the graph: an utterance's units and their alternatives

GRAPH_KIND, AUTOREGRESSIVE_KIND = "graph", "autoregressive"  # kinds of decoding in confidence.json


@dataclass(frozen=True)
class DecodedUnits:
    """What the linguistic decoder wrote for each row of a batch."""

    tokens: list[list[int]]  # unit ids, without special ones
    passes: list[int]  # number of passes
    evidence: EvidenceRows
    # the graph's states (K + 1, D) at the K units and </s>; None: no graph chose them
    hidden: list[Tensor] | None = None


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
        check_choice("strategy", strategy, STRATEGIES)
        if strategy != "autoregressive" and self.model.decoder is None:
            raise InputError(
                f"`strategy` must be autoregressive for '{self.name}', which has no graph, but is "
                f"{format_value(strategy)}. Choose that one."
            )
        if strategy in STRATEGIES_WITH_AR_DECODER and self.model.ar is None:
            raise InputError(
                f"`strategy` must be one of {', '.join(GRAPH_STRATEGIES)} for '{self.name}', which has no "
                f"autoregressive decoder, but is {format_value(strategy)}."
            )
        return strategy

    @torch.inference_mode()
    def translate_batch(
        self, samples: Sequence[Tensor], strategy: str, on_pass: OnPass | None = None, segment: int = 0
    ) -> list[SpokenTranslation]:
        """Translate one padded batch (on a CPU a single utterance). The caller must hold the model's lock.

        The units of a row are the same as without the batch; its samples differ only by rounding.

        Args:
            samples: 16 kHz samples (T,) of each utterance.
            strategy: The decoding strategy.
            on_pass: Only for a batch of one utterance.
            segment: Index of this utterance, which `on_pass` gets.
        """
        clock = Stopwatch(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            with clock.stage("features"), torch.autocast(self.device.type, enabled=False):
                features = self.layout.features(samples)
            with clock.stage("encoder"):
                source = self.layout.source(features)
            rows: list[int] = source.lengths.nonzero()[:, 0].tolist()  # those with a transcript
            if 0 < len(rows) < len(samples):
                source = source.select(rows)
            translations = self._translate_source(source, strategy, clock, on_pass, segment) if rows else []
        results = [SpokenTranslation("", [], torch.zeros(0), {}, passes=0) for _ in samples]
        for row, translation in zip(rows, translations, strict=True):
            results[row] = translation
        timings = {stage: clock.seconds.get(stage, 0.0) / len(samples) for stage in STAGES}
        return [replace(result, timings=dict(timings)) for result in results]

    def _translate_source(
        self, source: EncodedSpeech, strategy: str, clock: Stopwatch, on_pass: OnPass | None, segment: int
    ) -> list[SpokenTranslation]:
        """Translate encoded speech.

        Args:
            clock: Measures the stages; the translations get no timings.
        """
        kind = AUTOREGRESSIVE_KIND if strategy in AUTOREGRESSIVE_OUTPUT else GRAPH_KIND
        limit = source.limits[0] if kind == AUTOREGRESSIVE_KIND else None
        listener = PassListener(on_pass, segment, self.units, self.device, limit)
        with clock.stage("linguistic"):
            decoded = self._decode(source, strategy, listener)
        with clock.stage("confidence"):
            evidence = self._evidence(decoded, source, strategy)
            confidences = [estimate_confidence(row, self.calibrations, kind) for row in evidence]
        with clock.stage("words"):
            texts = self.layout.texts(decoded.tokens)
        with clock.stage("acoustic"):
            mels = self.layout.mels(decoded.tokens, texts, decoded.hidden)
        with clock.stage("vocoder"):
            voices = self._voice(mels)
        return [
            SpokenTranslation(
                text=text,
                units=[self.units[token] for token in tokens],
                samples=voice,
                timings={},
                passes=passes,
                confidence=confidence,
                evidence=row_evidence,
            )
            for text, tokens, voice, passes, confidence, row_evidence in zip(
                texts, decoded.tokens, voices, decoded.passes, confidences, evidence, strict=True
            )
        ]

    def _decode(self, source: EncodedSpeech, strategy: str, listener: PassListener) -> DecodedUnits:
        if strategy == "autoregressive":
            return self._decode_autoregressive(source, listener)
        if strategy == "verified":
            return self._decode_verified(source, listener)
        return self._decode_graph(source, strategy, listener)

    def _decode_autoregressive(self, source: EncodedSpeech, listener: PassListener) -> DecodedUnits:
        steps, max_length = list[Tensor](), max(source.limits)
        for units in self.model.autoregressive.greedy_steps(source.states, source.lengths, max_length):
            listener.step(units)
            steps.append(units)
        rows = rows_of_steps(steps, max_length)
        tokens = _cut_to_limits(rows, source.limits)
        return DecodedUnits(tokens, passes=[len(row) + 1 for row in rows], evidence=[{} for _ in rows])

    def _decode_verified(self, source: EncodedSpeech, listener: PassListener) -> DecodedUnits:
        """Decode the units of `ArDecoder.generate` in fewer passes: the graph drafts, the decoder verifies."""
        lattice = self.model.lattice(source.states, source.lengths, source.sizes)
        listener.graph(lattice.emissions[0], lattice.links[0])
        drafter = DagDrafter(lattice.emissions, lattice.links, lattice.lengths, EOS)
        target = UnitTarget(self.model.autoregressive)
        drafter.check(target)
        prompt = torch.full((len(source.states), 1), BOS, device=self.device)
        # the same limit and end tokens as in `ArDecoder.generate`, so that the units are the same
        stop = Stop(max(source.limits) + 1, frozenset({EOS, PAD}))
        text = Sequences(prompt, stop)
        inputs = {"states": source.states, "state_lengths": source.lengths}
        passes = [0] * len(source.states)
        for round_ in decode(target, inputs, text, MatchRule(), drafter, FixedBudget(DRAFT_NODES)):
            for row in round_.rows:
                passes[row] += 1
            listener.tokens(round_.tokens[0])
        rows = [row[:-1] if row[-1] in (EOS, PAD) else row for row in text.tokens]
        return DecodedUnits(_cut_to_limits(rows, source.limits), passes, self._graph_evidence(lattice))

    def _decode_graph(self, source: EncodedSpeech, strategy: str, listener: PassListener) -> DecodedUnits:
        lattice = self.model.lattice(source.states, source.lengths, source.sizes)
        path, scores, passes = self._path(lattice, strategy), list[TextScores](), 1
        if strategy == "reranked":
            path, scores = self._rerank(path, source)
            passes = 2
        listener.graph(lattice.emissions[0], lattice.links[0], path.tokens[0], path.vertices[0])
        keep, tokens = _spoken_units(path)
        state_steps = [torch.cat([steps, last[None]]) for steps, last in zip(keep, path.lengths - 1, strict=True)]
        hidden = [
            states[vertices[steps]]
            for states, vertices, steps in zip(lattice.hidden, path.vertices, state_steps, strict=True)
        ]
        evidence = path_evidence(path.scores, path.lengths)
        if scores:
            evidence = [row | autoregressive_evidence(score) for row, score in zip(evidence, scores, strict=True)]
        # there is no autoregressive decoder to score the text, so the graph's probabilities are used
        if self.model.ar is None:
            vertices = vertex_evidence(lattice.emissions, path.vertices, path.tokens)
            evidence = [row | new for row, new in zip(evidence, vertices, strict=True)]
        return DecodedUnits(tokens, [passes] * len(tokens), evidence, hidden)

    def _evidence(self, decoded: DecodedUnits, source: EncodedSpeech, strategy: str) -> EvidenceRows:
        """Compute the evidence for the confidence of each row, beside what the decoder gave."""
        evidence = decoded.evidence
        if strategy == "autoregressive" and self.model.decoder is not None:
            evidence = self._graph_evidence(self.model.lattice(source.states, source.lengths, source.sizes))
        if self.model.ar is not None and strategy != "reranked":
            scores = score_texts(self.model.ar, decoded.tokens, source)
            evidence = [row | autoregressive_evidence(score) for row, score in zip(evidence, scores, strict=True)]
        return [row | new for row, new in zip(evidence, head_evidence(source), strict=True)]

    def _graph_evidence(self, lattice: Lattice) -> EvidenceRows:
        """Compute evidence for an autoregressive text from the path that the graph itself would choose."""
        path = self._path(lattice, "lookahead" if self.model.english_ngram is None else "beam")
        return path_evidence(path.scores, path.lengths)

    def _path(self, lattice: Lattice, strategy: str) -> LatticePath:
        """Find each row's path through the graph. For "reranked": several paths for each row, one after the other."""
        if strategy in ("beam", "reranked"):
            count = RERANKED_TEXTS if strategy == "reranked" else 1
            return lattice.beam(self.model.english_ngram, self.decoding.collapse, count)
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
        scores = score_texts(self.model.autoregressive, texts, repeated)
        totals = paths.beams + paths.beams.new_tensor([sum(text.logprobs) for text in scores])
        best = torch.arange(rows, device=totals.device) * count + totals.view(rows, count).argmax(-1)
        return paths.select(best), [scores[row] for row in best.tolist()]

    def _voice(self, mels: list[Tensor]) -> list[Tensor]:
        """Convert log mels (F, 80) of each utterance to samples (T,) on the CPU, within [-1, 1]."""
        rows_with_sound = [row for row, mel in enumerate(mels) if len(mel)]
        voices = [torch.zeros(0) for _ in mels]
        if rows_with_sound:
            batch, lengths = pad([mels[row] for row in rows_with_sound], self.device)
            with torch.autocast(self.device.type, enabled=False):
                samples = self.vocoder(batch.float(), lengths).float().clamp(-1, 1).cpu()
            for row, voice, length in zip(rows_with_sound, samples, lengths.tolist(), strict=True):
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
