"""French speech to English speech: runs the networks of one DASpeech model in order, and times them.

Features, encoder, linguistic decoder (a path through the graph, or the autoregressive baseline), acoustic model,
vocoder, words. For files and long recordings see `load.py` and `translate.py`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mmdec import audio
from mmdec.checks.arguments import show
from mmdec.decode.budget import Budget
from mmdec.decode.loop import decode
from mmdec.decode.sampling import Sequences, Stop
from mmdec.decode.verify import MatchRule
from mmdec.decode.watch import Stopwatch
from mmdec.drafters.dag import DagDrafter
from mmdec.generation.model_lock import reading
from mmdec.hub.daspeech import DASpeechParts, save_parts
from mmdec.hub.publish import push_folder
from mmdec.nn.dag_decoder import BOS
from mmdec.pipelines.confidence import FLOOR, Calibration, confidence, evidence
from mmdec.pipelines.translation.passes import SPECIALS, OnPass, PassListener
from mmdec.targets.units import EOS, PAD, UnitTarget
from mmdec.types import InputError

STRATEGIES = ("lookahead", "greedy", "viterbi", "joint-viterbi", "autoregressive", "verified")
STAGES = ("features", "encoder", "linguistic", "confidence", "acoustic", "vocoder", "words")
GPU_ROWS = 16  # rows of a padded batch on a GPU
DRAFT_NODES = 192  # draft nodes of a graph: an utterance's units, and alternatives

GRAPH, AUTOREGRESSIVE = "graph", "autoregressive"  # kinds of decoding in confidence.json

_Decoded = tuple[list[list[int]], list[Tensor], list[int]]  # units, acoustic inputs [(K + 1, d_tts), ...], passes


@dataclass(frozen=True)
class SpokenTranslation:
    """The translation of one utterance."""

    text: str
    units: list[str]
    samples: Tensor  # (T,) float32 on the CPU, 16 kHz
    timings: dict[str, float]  # stage -> seconds; utterances of a batch get equal shares
    passes: int = 1  # passes of the linguistic decoder that was used
    confidence: float = 0.0  # 0 to 1: the share of words that are likely right
    evidence: Mapping[str, float] = field(default_factory=lambda: {})  # the evidence for the confidence


class SpeechTranslator:
    """A translator. It holds weights only, so several callers may share it.

    `vocoder` has the interface of `Vocoder`: mel (B, F, 80), lengths (B,) -> samples (B, F * 256).
    """

    def __init__(
        self,
        parts: DASpeechParts,
        calibrations: Mapping[str, Calibration] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """calibrations: of the confidence, by kind of decoding; None: use token probabilities.
        dtype: of matrix products, except the vocoder's, whose sound bfloat16 would make noisy.
        """
        self.dtype = dtype
        self.parts, self.calibrations = parts, calibrations or {}
        self.model, self.vocoder = parts.model.eval(), parts.vocoder.eval()
        self.words, self.units = parts.words, parts.units
        self.decoding, self.name = parts.decoding, parts.name

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return next(self.model.parameters()).device

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
        self, samples: Sequence[Tensor], strategy: str = "lookahead", on_pass: OnPass | None = None
    ) -> list[SpokenTranslation]:
        """Translate 16 kHz utterances [(T,), ...], in order.

        On a CPU utterances are processed one by one, so a batch gives exactly the same as single calls. On a GPU they
        are padded into groups, and the rows of a group share its time equally. With `on_pass` they are processed one by
        one everywhere.

        strategy: "verified" is the autoregressive decoder's greedy output in fewer passes: the graph drafts, it
            verifies.
        on_pass: called after each pass of the linguistic decoder.
        """
        check_strategy(strategy)
        with reading(self.model, self.vocoder):  # the model must not change between two groups
            rows = 1 if self.device.type == "cpu" or on_pass is not None else GPU_ROWS
            groups = [samples[start : start + rows] for start in range(0, len(samples), rows)]
            return [
                result
                for index, group in enumerate(groups)
                for result in self.translate_together(group, strategy, on_pass, index)
            ]

    @torch.inference_mode()
    def translate_together(
        self, samples: Sequence[Tensor], strategy: str, on_pass: OnPass | None = None, piece: int = 0
    ) -> list[SpokenTranslation]:
        """Translate one padded batch (on a CPU a single utterance). The caller holds the model's lock.

        A row's units are the same as without the batch; its samples differ by rounding only. on_pass: for a batch of
        one, the recording's `piece`.
        """
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self._translate_together(samples, strategy, on_pass, piece)

    def _translate_together(
        self, samples: Sequence[Tensor], strategy: str, on_pass: OnPass | None, piece: int
    ) -> list[SpokenTranslation]:
        clock = Stopwatch(self.device)
        with clock.stage("features"), torch.autocast(self.device.type, enabled=False):
            features, frames = pad([audio.fbank(row) for row in samples], self.device)  # (B, N, 80), (B,)
        with clock.stage("encoder"):
            states, state_lengths = self.model.encode(features, frames)
        with clock.stage("linguistic"):
            listener = PassListener(on_pass, piece, self.units, self.device)
            if strategy in ("autoregressive", "verified"):
                decoder = self._autoregressive if strategy == "autoregressive" else self._verified
                tokens, hidden, passes = decoder(states, state_lengths, frames, listener)
                seen: list[dict[str, float]] = [{} for _ in tokens]
            else:
                tokens, hidden, seen = self._graph(states, state_lengths, frames, strategy, listener)
                passes = [1] * len(tokens)
        with clock.stage("confidence"):
            kind = GRAPH if seen[0] else AUTOREGRESSIVE
            seen = [
                graph | own
                for graph, own in zip(seen, self._second_opinion(tokens, states, state_lengths), strict=True)
            ]
            sure = [confidence(row, self.calibrations, kind) for row in seen]
        with clock.stage("acoustic"):
            mels = self._acoustic(tokens, hidden)
        with clock.stage("vocoder"):
            voices = self._voice(mels)
        units = [[self.units[token] for token in row] for row in tokens]
        with clock.stage("words"):
            texts = [self.words.decode(row) if row else "" for row in units]
        timings = {stage: clock.seconds[stage] / len(samples) for stage in STAGES}
        return [
            SpokenTranslation(text, row, voice, dict(timings), *told)
            for text, row, voice, *told in zip(texts, units, voices, passes, sure, seen, strict=True)
        ]

    def _second_opinion(self, tokens: list[list[int]], states: Tensor, state_lengths: Tensor) -> list[dict[str, float]]:
        """Evidence from one pass of the autoregressive decoder: its probabilities of these units, and where it would
        differ."""
        rows = [torch.tensor([BOS, *row, EOS], device=self.device) for row in tokens]
        said = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        chances = self.model.ar(said[:, :-1], states, state_lengths).float().log_softmax(-1)
        chosen = chances.gather(2, said[:, 1:, None])[..., 0].tolist()
        same = (chances.argmax(-1) == said[:, 1:]).tolist()
        seen = []
        for row, logprobs, agrees in zip(tokens, chosen, same, strict=True):
            size = len(row) + 1
            differ = 1 - sum(agrees[:size]) / size
            seen.append(evidence(logprobs[:size]) | {"differs": math.log(differ + FLOOR)})
        return seen

    def _autoregressive(
        self, states: Tensor, state_lengths: Tensor, frames: Tensor, listener: PassListener
    ) -> _Decoded:
        """As `_graph`, by the autoregressive decoder; also returns each row's passes."""
        limits = _limits(frames)
        listener.limit = limits[0]
        rows = self.model.ar.generate(states, state_lengths, max(limits), on_step=listener.step)
        return self._decoded(rows, limits, [len(row) + 1 for row in rows])

    def _verified(self, states: Tensor, state_lengths: Tensor, frames: Tensor, listener: PassListener) -> _Decoded:
        """As `_autoregressive`: the same units, in fewer passes."""
        limits = _limits(frames)
        listener.limit = limits[0]
        rows, passes = self.verified(states, state_lengths, frames, max(limits), listener)
        return self._decoded(rows, limits, passes)

    def _decoded(self, rows: list[list[int]], limits: list[int], passes: list[int]) -> _Decoded:
        """Cut rows to their limits, drop special units, and compute their acoustic inputs."""
        tokens = [
            [token for token in row[:limit] if token >= SPECIALS] for row, limit in zip(rows, limits, strict=True)
        ]
        inputs = [self.model.tts.embed(torch.tensor([[*row, EOS]], device=self.device))[0] for row in tokens]
        return tokens, inputs, passes

    @torch.inference_mode()
    def verified(
        self,
        states: Tensor,
        state_lengths: Tensor,
        frames: Tensor,
        max_length: int,
        listener: PassListener | None = None,
    ) -> tuple[list[list[int]], list[int]]:
        """Each row's units, equal to `ArDecoder.generate`'s, and the decoder's passes. listener: for a batch of one."""
        lattice = self.model.lattice(states, state_lengths, frames)
        if listener is not None:
            listener.graph(lattice.emissions[0], lattice.links[0])
        proposing = DagDrafter(lattice.emissions, lattice.links, lattice.lengths, EOS)
        target = UnitTarget(self.model.ar)
        proposing.check(target)
        prompt = torch.full((len(states), 1), BOS, device=self.device)
        text = Sequences(prompt, Stop(max_length + 1, frozenset({EOS, PAD})))  # the same limits as `ArDecoder.generate`
        inputs = {"states": states, "state_lengths": state_lengths}
        passes = [0] * len(states)
        for round_ in decode(target, inputs, text, MatchRule(), proposing, Budget.fixed(DRAFT_NODES)):
            for row in round_.rows:
                passes[row] += 1
            if listener is not None:
                listener.tokens(round_.tokens[0])
        return [row[:-1] if row[-1] in (EOS, PAD) else row for row in text.tokens], passes

    def _graph(
        self, states: Tensor, state_lengths: Tensor, frames: Tensor, strategy: str, listener: PassListener
    ) -> tuple[list[list[int]], list[Tensor], list[dict[str, float]]]:
        """Decode the graph: encoder states (B, S, d) -> each row's K units, acoustic inputs (K + 1, d_tts), path
        evidence.

        </s> stays in the acoustic input with zero frames, as in training.
        """
        lattice = self.model.lattice(states, state_lengths, frames)
        path = lattice.path(
            strategy,
            lookahead_weight=self.decoding.lookahead_weight,
            length_penalty=self.decoding.length_penalty,
            collapse=self.decoding.collapse,
        )
        listener.graph(lattice.emissions[0], lattice.links[0], path.tokens[0], path.vertices[0])
        real = path.tokens >= SPECIALS  # (B, K); padding is -1
        keep = [row.nonzero()[:, 0] for row in real]
        heard = [torch.cat([steps, last[None]]) for steps, last in zip(keep, path.lengths - 1, strict=True)]
        tokens = [row[steps].tolist() for row, steps in zip(path.tokens, keep, strict=True)]
        inputs = [
            self.model.acoustic_input(hidden[vertices[steps]][None])[0]
            for hidden, vertices, steps in zip(lattice.hidden, path.vertices, heard, strict=True)
        ]
        means = (-path.scores / path.lengths).clamp(0, 30).tolist()
        return tokens, inputs, [{"graph": math.log(mean + FLOOR)} for mean in means]

    def _acoustic(self, tokens: list[list[int]], inputs: list[Tensor]) -> list[Tensor]:
        """Inputs [(K, d_tts), ...] -> log mels [(F, 80), ...]; a row without units has none."""
        spoken = [row for row, units in enumerate(tokens) if units]
        mels = [torch.zeros(0, audio.MELS, device=self.device) for _ in tokens]
        if spoken:
            batch, lengths = pad([inputs[row] for row in spoken], self.device)
            output = self.model.tts(batch, lengths)
            for row, mel, length in zip(spoken, output.mel, output.mel_lengths.tolist(), strict=True):
                mels[row] = mel[:length]
        return mels

    def _voice(self, mels: list[Tensor]) -> list[Tensor]:
        """Log mels [(F, 80), ...] -> samples [(F * 256,), ...] on the CPU, within [-1, 1]."""
        spoken = [row for row, mel in enumerate(mels) if len(mel)]
        voices = [torch.zeros(0) for _ in mels]
        if spoken:
            batch, lengths = pad([mels[row] for row in spoken], self.device)
            with torch.autocast(self.device.type, enabled=False):
                samples = self.vocoder(batch.float(), lengths).float().clamp(-1, 1).cpu()
            for row, voice, length in zip(spoken, samples, lengths.tolist(), strict=True):
                voices[row] = voice[: length * audio.HOP]
        return voices


def _limits(frames: Tensor) -> list[int]:
    """Maximum units of recordings with so many frames (B,): 25 a second, more than anyone speaks."""
    return (24 + frames // 4).tolist()


def check_strategy(strategy: str) -> None:
    """Raise InputError for an unknown strategy."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise InputError(
            f"`strategy` must be one of {', '.join(STRATEGIES)}, but is {show(strategy)}. Choose one of these."
        )


def pad(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """[(N, d), ...] -> (B, max N, d) padded with zeros, and lengths (B,)."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return torch.nn.utils.rnn.pad_sequence([row.to(device) for row in rows], batch_first=True), lengths


def total_timings(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum each stage's seconds over several utterances."""
    return {stage: sum(part[stage] for part in parts) for stage in STAGES}
