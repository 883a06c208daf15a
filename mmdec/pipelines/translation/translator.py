"""Runs the networks of a French-to-English speech translator in order, and times them.

The order is: features, encoder, linguistic decoder (a path through the graph, or the autoregressive baseline), words,
acoustic model, vocoder. Each pass of the linguistic decoder, and the graph, can be reported: `Pass`. The differences
between the two layouts of models are in `layouts.py`; for loading, files and long recordings see `translate.py`.
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
from mmdec.decode.budget import Budget
from mmdec.decode.loop import decode
from mmdec.decode.sampling import Sequences, Stop
from mmdec.decode.verify import MatchRule
from mmdec.decode.watch import Stopwatch
from mmdec.drafters.dag import DagDrafter
from mmdec.generation.model_lock import reading
from mmdec.hub.daspeech import DASpeechParts, save_parts
from mmdec.hub.heard_translator import HeardParts
from mmdec.hub.publish import push_folder
from mmdec.hub.translator_files import GRAPH_STRATEGIES, JUDGED, STRATEGIES
from mmdec.nn.ar_decoder import ArDecoder
from mmdec.nn.dag_decoder import BOS, Lattice
from mmdec.nn.daspeech import DASpeech, Source
from mmdec.ops.dag_decode import LatticePath
from mmdec.pipelines.confidence import FLOOR, Calibration, confidence, evidence
from mmdec.pipelines.translation.layouts import Layout, layout_of, pad
from mmdec.targets.units import EOS, PAD, UnitTarget
from mmdec.types import InputError

__all__ = ["GRAPH_STRATEGIES", "STAGES", "SpeechTranslator", "SpokenTranslation", "check_strategy", "total_timings"]

STAGES = ("features", "encoder", "linguistic", "confidence", "acoustic", "vocoder", "words")
GPU_ROWS = 16  # rows of a padded batch on a GPU
RERANKED = 8  # number of the graph's best texts that the autoregressive decoder scores, for "reranked"
DRAFT_NODES = 192  # the most nodes of a draft from the graph: an utterance's units and alternatives

GRAPH, AUTOREGRESSIVE = "graph", "autoregressive"  # kinds of decoding in confidence.json

Rows = list[dict[str, float]]
Decoder = Callable[[Tensor, Tensor, Tensor], Tensor]
# for each unit of a text and its end: the decoder's log-probability, and whether this unit is its first choice
Reading = tuple[list[float], list[bool]]
# for each row: its K units; the graph's states (K + 1, D) of these and </s>; number of passes; evidence
_Decoded = tuple[list[list[int]], list[Tensor] | None, list[int], Rows]
SPECIALS = 4  # <s> <pad> </s> <unk> are the first four units of every vocabulary


@dataclass(frozen=True)
class Graph:
    """The graph of one utterance, on the CPU."""

    emissions: Tensor = field(repr=False)  # (L, V) log-probabilities of V units at L vertices
    links: Tensor = field(repr=False)  # (L, L) log-probabilities of links from row to column, -inf where there is none
    units: list[str] = field(repr=False)  # the V units' names, by id
    path: list[int]  # vertices of the chosen path in order; empty if the graph only drafts
    chosen: list[str]  # the unit of each vertex on the path, <s> and </s> included


@dataclass(frozen=True)
class Pass:
    """One pass of a network: it makes units final, or, for strategy "verified", the graph's pass drafts them."""

    piece: int  # index of the piece: a long recording is cut at its pauses
    units: list[str]  # units that this pass made final, in order
    tokens: int  # number of units that it made final, special units such as </s> included
    seconds: float  # since the piece's linguistic decoding began, without the time in `on_pass`
    graph: Graph | None = None  # the graph that this pass made; None for a pass of the autoregressive decoder


OnPass = Callable[[Pass], None]


@final
class PassListener:
    """Reports one utterance's tokens to `on_pass` as timed passes. Does nothing without `on_pass`."""

    def __init__(self, on_pass: OnPass | None, piece: int, units: Sequence[str], device: torch.device) -> None:
        self._on_pass, self._piece, self._units = on_pass, piece, list(units)
        self._stopwatch, self._seconds = Stopwatch(device), 0.0
        self.limit: int | None = None  # the most tokens to report, because a decoder may run one step more
        # whether the row has ended: on a GPU the decoder checks this rarely, so it runs a few steps more
        self._ended = False

    def tokens(self, tokens: Sequence[int], graph: Graph | None = None) -> None:
        """Report a pass that made these token ids final, special ones included. graph: the graph of this pass, if it
        made one."""
        if self._on_pass is None:
            return
        self._seconds += self._stopwatch.lap()
        if self.limit is not None:
            tokens = tokens[: self.limit]
            self.limit -= len(tokens)
        units = [self._units[token] for token in tokens if token >= SPECIALS]
        self._on_pass(Pass(self._piece, units, len(tokens), self._seconds, graph))
        self._stopwatch.lap()

    def step(self, tokens: Tensor) -> None:
        """Report a step of `ArDecoder.generate`, as its callback. tokens: (1,). Skips steps after the row's end."""
        if self._on_pass is not None and not self._ended:
            token = int(tokens)
            self._ended = token in (EOS, PAD)
            self.tokens([token])

    def graph(
        self, emissions: Tensor, links: Tensor, tokens: Tensor | None = None, vertices: Tensor | None = None
    ) -> None:
        """Report one row's graph. If a path is given, its units are final.

        emissions: (L, V) log-probabilities of V units at L vertices. links: (L, L) log-probabilities. tokens, vertices:
        (K,) of the path's K steps, padded with -1.
        """
        if self._on_pass is None:
            return
        chosen = [] if tokens is None else [token for token in tokens.tolist() if token >= 0]
        path = [] if vertices is None else [vertex for vertex in vertices.tolist() if vertex >= 0]
        names = [self._units[token] for token in chosen]
        self.tokens(chosen, Graph(emissions.cpu(), links.cpu(), self._units, path, names))


def readings(decoder: Decoder, tokens: Sequence[Sequence[int]], source: Source) -> list[Reading]:
    """Score each row's units in one pass of the autoregressive decoder.

    decoder: takes units (B, M), source states and their lengths, and gives logits (B, M, V) over V units. tokens: each
    row's unit ids. source: the encoded recordings.
    """
    rows = [torch.tensor([BOS, *row, EOS], device=source.states.device) for row in tokens]
    said = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    chances = decoder(said[:, :-1], source.states, source.lengths).float().log_softmax(-1)
    chosen = chances.gather(2, said[:, 1:, None])[..., 0].tolist()
    same = (chances.argmax(-1) == said[:, 1:]).tolist()
    sizes = [len(row) + 1 for row in tokens]
    return [(row[:size], agrees[:size]) for row, agrees, size in zip(chosen, same, sizes, strict=True)]


def second_opinion(reading: Reading) -> dict[str, float]:
    """Compute evidence from the autoregressive decoder's scores of a text: its log-probabilities of the units, and the
    share of units for which it prefers another unit."""
    logprobs, agrees = reading
    return evidence(logprobs) | {"differs": math.log(1 - sum(agrees) / len(agrees) + FLOOR)}


def path_evidence(scores: Tensor, lengths: Tensor) -> Rows:
    """Compute evidence from the graph's path. scores: (B,) log-probability of each row's path. lengths: (B,) number of
    vertices on it."""
    means: list[float] = (-scores / lengths).clamp(0, 30).tolist()
    return [{"graph": math.log(mean + FLOOR)} for mean in means]


def vertex_evidence(emissions: Tensor, vertices: Tensor, tokens: Tensor) -> Rows:
    """Compute evidence from the graph's probabilities of the units on each row's path. emissions: (B, L, V)
    log-probabilities of V units at L vertices. vertices, tokens: (B, K) of the path's K steps, padded with -1."""
    rows = zip(emissions, vertices, tokens, strict=True)
    return [evidence(row[at[said >= 0], said[said >= 0]].tolist()) for row, at, said in rows]


def head_evidence(source: Source) -> Rows:
    """Compute evidence from a CTC head: its probabilities of the transcript's pieces; of each frame's likeliest piece
    or blank; and the number of pieces per frame, which is unusual for other languages and noise. Empty without a CTC
    head."""
    heard = source.heard
    if heard is None:
        return [{} for _ in source.limits]
    seen: Rows = []
    pieces: Tensor = heard.weights[..., 0].clamp(min=1e-12).log()
    rows = (pieces.tolist(), heard.lengths.tolist(), heard.logprobs.tolist(), heard.counts.tolist())
    for sure, places, logprobs, frames in zip(*rows, strict=True):
        doubt = -sum(logprobs[:frames]) / max(frames, 1)
        seen.append(
            evidence(sure[:places], "heard_")
            | {"frames": math.log(doubt + FLOOR), "rate": math.log(max(places, 1) / max(frames, 1))}
        )
    return seen


@dataclass(frozen=True)
class SpokenTranslation:
    """The translation of one utterance."""

    text: str
    units: list[str]  # names of its phones or word pieces
    samples: Tensor  # (T,) float32 on the CPU, 16 kHz
    timings: dict[str, float]  # stage -> seconds; utterances of a batch get equal shares
    passes: int = 1  # passes of the linguistic decoder that was used
    confidence: float = 0.0  # 0 to 1: the share of words that are likely right
    evidence: Mapping[str, float] = field(default_factory=lambda: {})  # the evidence for the confidence


class SpeechTranslator:
    """A translator. It holds weights only, so several callers may share it.

    `vocoder` has the interface of `Vocoder`: mel (B, F, 80) of F frames, lengths (B,) -> samples (B, F * 256).
    """

    def __init__(
        self,
        parts: DASpeechParts | HeardParts,
        calibrations: Mapping[str, Calibration] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """parts: the networks and tables. calibrations: of the confidence, by kind of decoding; None: use token
            probabilities.
        dtype: for matrix products. The vocoder keeps float32: bfloat16 would make its sound noisy.
        """
        self.dtype = dtype
        self.parts, self.calibrations = parts, calibrations or {}
        self.networks = tuple(network.eval() for network in parts.networks)
        self.model, self.vocoder = parts.model, parts.vocoder
        self.layout: Layout = layout_of(parts)
        self.units, self.decoding, self.name = parts.units, parts.decoding, parts.name

    @property
    def device(self) -> torch.device:
        """Return the device of the networks."""
        return next(self.model.parameters()).device

    @property
    def baseline(self) -> ArDecoder:
        """Return the autoregressive decoder. Raises InputError for a model that has none."""
        return self.model.baseline if isinstance(self.model, DASpeech) else self.model.ar

    def save_pretrained(self, directory: str | os.PathLike[str]) -> Path:
        """Write the model's folder. If writing fails, an existing folder stays as it was.

        Card, confidence and provenance are copied only if the weights were not changed. Raises: InputError for another
        vocoder than the model's own, or if the folder holds other files.
        """
        return save_parts(directory, self.parts)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the model's folder to the hub. Returns the commit's address. Raises InputError if that fails."""
        with tempfile.TemporaryDirectory(prefix="mmdec-push-") as folder:
            return push_folder(self.save_pretrained(Path(folder) / self.name), repo_id, private=private, token=token)

    def translate(
        self, samples: Sequence[Tensor], strategy: str | None = None, on_pass: OnPass | None = None
    ) -> list[SpokenTranslation]:
        """Translate 16 kHz utterances [(T,), ...], in order.

        On a CPU utterances are processed one by one, so a batch gives exactly the same as single calls. On a GPU they
        are padded into groups, and the rows of a group share its time equally. With `on_pass` they are processed one by
        one everywhere.

        strategy: None: the model's own. "verified" gives the autoregressive decoder's greedy output in fewer passes:
            the graph drafts, this decoder verifies. "reranked" takes the graph's best text by both decoders' scores.
        on_pass: called after each pass of the linguistic decoder.
        """
        strategy = self.checked(strategy)
        with reading(*self.networks):  # the model must not change between two groups
            rows = 1 if self.device.type == "cpu" or on_pass is not None else GPU_ROWS
            groups = [samples[start : start + rows] for start in range(0, len(samples), rows)]
            return [
                result
                for index, group in enumerate(groups)
                for result in self.translate_together(group, strategy, on_pass, index)
            ]

    def checked(self, strategy: str | None) -> str:
        """Check the strategy, and return it; for None return the model's own. Raises InputError if this model does not
        have the strategy."""
        if strategy is None:
            return self.decoding.strategy
        check_strategy(strategy)
        if strategy != "autoregressive" and self.model.decoder is None:
            raise InputError(
                f"`strategy` must be autoregressive for '{self.name}', which has no graph, but is {show(strategy)}. "
                "Choose that one."
            )
        if strategy in JUDGED and self.model.ar is None:
            raise InputError(
                f"`strategy` must be one of {', '.join(GRAPH_STRATEGIES)} for '{self.name}', which has no "
                f"autoregressive decoder, but is {show(strategy)}. Choose one of these."
            )
        return strategy

    @torch.inference_mode()
    def translate_together(
        self, samples: Sequence[Tensor], strategy: str, on_pass: OnPass | None = None, piece: int = 0
    ) -> list[SpokenTranslation]:
        """Translate one padded batch (on a CPU a single utterance). The caller holds the model's lock.

        A row's units are the same as without the batch; its samples differ by rounding only. on_pass: only for a batch
        of one. piece: index of this utterance, for `on_pass`.
        """
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self._translate_together(samples, strategy, on_pass, piece)

    def _translate_together(
        self, samples: Sequence[Tensor], strategy: str, on_pass: OnPass | None, piece: int
    ) -> list[SpokenTranslation]:
        clock = Stopwatch(self.device)
        with clock.stage("features"), torch.autocast(self.device.type, enabled=False):
            features = self.layout.features(samples)
        with clock.stage("encoder"):
            source = self.layout.source(features)
        heard: list[int] = source.lengths.nonzero()[:, 0].tolist()
        if len(heard) < len(samples):
            source = source.select(heard)
        listener = PassListener(on_pass, piece, self.units, self.device)
        found = self._translated(source, strategy, listener, clock) if heard else []
        timings = {stage: clock.seconds.get(stage, 0.0) / len(samples) for stage in STAGES}
        results = [SpokenTranslation("", [], torch.zeros(0), dict(timings), passes=0) for _ in samples]
        for row, result in zip(heard, found, strict=True):
            results[row] = replace(result, timings=dict(timings))
        return results

    def _translated(
        self, source: Source, strategy: str, listener: PassListener, clock: Stopwatch
    ) -> list[SpokenTranslation]:
        """Translate each row: text, units and sound, without timings. source: the encoded recordings; no row may be
        empty. listener: gets the passes. clock: measures the stages."""
        with clock.stage("linguistic"):
            kind = AUTOREGRESSIVE if strategy in ("autoregressive", "verified") else GRAPH
            run = {"autoregressive": self._autoregressive, "verified": self._verified}.get(strategy, self._graph)
            tokens, hidden, passes, seen = run(source, strategy, listener)
        with clock.stage("confidence"):
            if strategy == "autoregressive" and self.model.decoder is not None:
                seen = self._graphs_own(self.model.lattice(source.states, source.lengths, source.sizes))
            if self.model.ar is not None and strategy != "reranked":
                read = readings(self.model.ar, tokens, source)
                seen = [row | second_opinion(one) for row, one in zip(seen, read, strict=True)]
            seen = [row | new for row, new in zip(seen, head_evidence(source), strict=True)]
            sure = [confidence(row, self.calibrations, kind) for row in seen]
        with clock.stage("words"):
            texts = self.layout.texts(tokens)
        with clock.stage("acoustic"):
            mels = self.layout.mels(tokens, texts, hidden)
        with clock.stage("vocoder"):
            voices = self._voice(mels)
        units = [[self.units[token] for token in row] for row in tokens]
        return [
            SpokenTranslation(text, row, voice, {}, *told)
            for text, row, voice, *told in zip(texts, units, voices, passes, sure, seen, strict=True)
        ]

    def _autoregressive(self, source: Source, strategy: str, listener: PassListener) -> _Decoded:
        listener.limit = source.limits[0]
        rows = self.baseline.generate(source.states, source.lengths, max(source.limits), on_step=listener.step)
        return _within(rows, source.limits), None, [len(row) + 1 for row in rows], [{} for _ in rows]

    def _verified(self, source: Source, strategy: str, listener: PassListener) -> _Decoded:
        """Decode the units that `ArDecoder.generate` would give, in fewer passes: the graph drafts them."""
        listener.limit = source.limits[0]
        lattice = self.model.lattice(source.states, source.lengths, source.sizes)
        listener.graph(lattice.emissions[0], lattice.links[0])
        proposing = DagDrafter(lattice.emissions, lattice.links, lattice.lengths, EOS)
        target = UnitTarget(self.baseline)
        proposing.check(target)
        prompt = torch.full((len(source.states), 1), BOS, device=self.device)
        stop = Stop(max(source.limits) + 1, frozenset({EOS, PAD}))  # as in `ArDecoder.generate`: equal units
        text = Sequences(prompt, stop)
        inputs = {"states": source.states, "state_lengths": source.lengths}
        passes = [0] * len(source.states)
        for round_ in decode(target, inputs, text, MatchRule(), proposing, Budget.fixed(DRAFT_NODES)):
            for row in round_.rows:
                passes[row] += 1
            listener.tokens(round_.tokens[0])
        rows = [row[:-1] if row[-1] in (EOS, PAD) else row for row in text.tokens]
        return _within(rows, source.limits), None, passes, self._graphs_own(lattice)

    def _graph(self, source: Source, strategy: str, listener: PassListener) -> _Decoded:
        lattice = self.model.lattice(source.states, source.lengths, source.sizes)
        path, read = self._path(lattice, strategy), []
        if strategy == "reranked":
            path, read = self._likeliest(path, source)
        listener.graph(lattice.emissions[0], lattice.links[0], path.tokens[0], path.vertices[0])
        keep, tokens = _spoken(path)
        spoken = [torch.cat([steps, last[None]]) for steps, last in zip(keep, path.lengths - 1, strict=True)]
        hidden = [
            states[vertices[steps]]
            for states, vertices, steps in zip(lattice.hidden, path.vertices, spoken, strict=True)
        ]
        seen = path_evidence(path.scores, path.lengths)
        if read:
            seen = [row | second_opinion(one) for row, one in zip(seen, read, strict=True)]
        if self.model.ar is None:  # no autoregressive decoder can judge: take the graph's own probabilities
            own = vertex_evidence(lattice.emissions, path.vertices, path.tokens)
            seen = [row | new for row, new in zip(seen, own, strict=True)]
        return tokens, hidden, [2 if strategy == "reranked" else 1] * len(tokens), seen

    def _graphs_own(self, lattice: Lattice) -> Rows:
        """Compute evidence for a text of the autoregressive decoder: the log-probability of the graph's own path."""
        guided = getattr(self.model, "written", None) is not None
        path = self._path(lattice, "beam" if guided else "lookahead")
        return path_evidence(path.scores, path.lengths)

    def _path(self, lattice: Lattice, strategy: str) -> LatticePath:
        """Find each row's path through the graph; for "reranked", each row's best paths, one after another."""
        if strategy in ("beam", "reranked"):
            count = RERANKED if strategy == "reranked" else 1
            return lattice.beam(getattr(self.model, "written", None), self.decoding.collapse, count)
        return lattice.path(
            strategy,
            lookahead_weight=self.decoding.lookahead_weight,
            length_penalty=self.decoding.length_penalty,
            collapse=self.decoding.collapse,
        )

    def _likeliest(self, paths: LatticePath, source: Source) -> tuple[LatticePath, list[Reading]]:
        """Choose each row's best path: the highest sum of beam search score and log-probability of the path's text by
        the autoregressive decoder, which scores all texts in one pass. Returns the paths, and these scores of their
        texts.

        Source: after noisy parallel decoding (Gu et al. 2018, "Non-autoregressive neural machine translation", 4.2).
        """
        rows = len(source.states)
        count = len(paths.scores) // rows
        _, texts = _spoken(paths)
        repeated = source.select([row for row in range(rows) for _ in range(count)])
        assert paths.beams is not None  # for type checkers: paths of a beam search have `beams`
        read = readings(self.baseline, texts, repeated)
        worth = paths.beams + paths.beams.new_tensor([sum(logprobs) for logprobs, _ in read])
        best = torch.arange(rows, device=worth.device) * count + worth.view(rows, count).argmax(-1)
        return paths.select(best), [read[row] for row in best.tolist()]

    def _voice(self, mels: list[Tensor]) -> list[Tensor]:
        """Turn log mels [(F, 80), ...] into samples [(T,), ...] on the CPU, within [-1, 1]."""
        spoken = [row for row, mel in enumerate(mels) if len(mel)]
        voices = [torch.zeros(0) for _ in mels]
        if spoken:
            batch, lengths = pad([mels[row] for row in spoken], self.device)
            with torch.autocast(self.device.type, enabled=False):
                samples = self.vocoder(batch.float(), lengths).float().clamp(-1, 1).cpu()
            for row, voice, length in zip(spoken, samples, lengths.tolist(), strict=True):
                voices[row] = voice[: self.parts.mels.samples(length)]
        return voices


def _spoken(paths: LatticePath) -> tuple[list[Tensor], list[list[int]]]:
    """Return for each path the steps (N,) whose unit is not a special unit, and these units."""
    keep = [row.nonzero()[:, 0] for row in paths.tokens >= SPECIALS]  # padding is -1
    return keep, [row[steps].tolist() for row, steps in zip(paths.tokens, keep, strict=True)]


def _within(rows: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Cut rows of unit ids to their limits (the most units of each), and remove special units."""
    return [[token for token in row[:limit] if token >= SPECIALS] for row, limit in zip(rows, limits, strict=True)]


def check_strategy(strategy: str) -> None:
    """Raise InputError for an unknown strategy."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise InputError(
            f"`strategy` must be one of {', '.join(STRATEGIES)}, but is {show(strategy)}. Choose one of these."
        )


def total_timings(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum each stage's seconds over several utterances."""
    return {stage: sum(part[stage] for part in parts) for stage in STAGES}
