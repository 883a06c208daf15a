"""Training of a CTC head on stored encoder states. The encoder is frozen, except for its last `top` layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from mmdec.daspeech.checkpoint import load_encoder, load_piece_translator
from mmdec.daspeech.training.module import ctc_loss, load_matching_weights
from mmdec.drafters.ctc.network import CtcHead, CtcHeadConfig, collapse
from mmdec.drafters.ctc.training.data import (
    STATES_PER_SECOND,
    CtcBatch,
    FrozenEncoder,
    WhisperSpeechEncoder,
    load_speech_encoder,
)
from mmdec.errors import InputError
from mmdec.io.audio import load_audio
from mmdec.training.checkpoints import load_averaged, read_start
from mmdec.training.metrics.text import phone_distance
from mmdec.training.module import RecipeModule
from mmdec.training.optim import MuonAdamW, groups
from mmdec.whisper.unpadded_encoder import SILENCE_MARGIN, STATES_TAIL, TopLayers


@dataclass(frozen=True)
class CtcOptions:
    """Options of `CtcModule` that a recipe (YAML file) sets.

    Args:
        d_states: Channels of an encoder state.
        stride: Number of encoder states for each output frame.
        d_model, layers, kernel: The head's channels, number of layers and width of convolutions in frames.
        warmup, decay_from, decay_steps: In training steps. The learning rate rises for `warmup` steps, and falls
            linearly to zero from step `decay_from` on, within `decay_steps`. If `decay_from` is None, it does not fall.
        time_masks: Number of masked spans in each recording, each up to `mask_states` states long.
        channels: Share of the state channels that are masked in a whole recording.
        start: File or folder to take initial weights from: a checkpoint, a speech translator, or a CTC drafter.
        top: Number of last layers of the Whisper `encoder` that are trained, too, at the learning rate `top_lr`. The
            stored states must be taken below these layers.
    """

    d_states: int = 512
    stride: int = 2
    d_model: int = 320
    layers: int = 5
    kernel: int = 11
    dropout: float = 0.1
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 200
    decay_from: int | None = None
    decay_steps: int = 1000
    time_masks: int = 2
    mask_states: int = 12
    channels: float = 0.1
    start: str | None = None
    top: int = 0
    encoder: str | None = None
    top_lr: float = 1e-4
    seed: int = 0


class CtcModule(RecipeModule):
    """Trains a CTC head.

    The loss is -log P(pieces | states) / number of pieces, averaged over the recordings of a batch.

    Args:
        units: The subword pieces ordered by id, the blank first.
        options: Fields of `CtcOptions`.
    """

    options: CtcOptions

    def __init__(self, units: list[str], **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.use_options(CtcOptions(**options))
        torch.manual_seed(self.options.seed)
        names = ("d_states", "stride", "d_model", "layers", "kernel", "dropout")
        sizes = {name: getattr(self.options, name) for name in names}
        self.head = CtcHead(CtcHeadConfig(pieces=len(units), **sizes))
        self.top = None
        if self.options.top:
            if self.options.encoder is None:
                raise InputError(
                    "`encoder` must name the Whisper whose `top` layers are trained, but is not given. "
                    "Give the model's folder."
                )
            encoder = load_encoder(self.options.encoder)
            self.top = TopLayers(encoder.config, self.options.top).take(encoder)
            self.max_frames = encoder.config.positions
        if self.options.start is not None:
            state = read_start(Path(self.options.start))
            # `start` is a drafter's file, which has only the head's weights
            if not any(name.startswith("head.") for name in state):
                state = {f"head.{name}": value for name, value in state.items()}
            # where `start` has no weights for `top`, the encoder's weights stay
            untrained = [name for name in load_matching_weights(self, state) if name.startswith("head.")]
            if untrained:
                total = len(self.head.state_dict())
                rank_zero_info(
                    f"{len(untrained)} of the head's {total} tensors start untrained: `start` has other sizes"
                )

    def forward(self, batch: CtcBatch) -> tuple[Tensor, Tensor]:
        """Return logits (B, F, V) for F output frames and V pieces, and the number of frames (B,).

        In training, random spans and channels of the states are masked.
        """
        states, lengths = batch.states, batch.lengths
        if self.training:
            states = states.masked_fill(self.draw_spans(batch)[..., None].to(states.device), 0.0)
        # The layers in `top` read all silence after a recording. The head reads only the beginning of this silence, so
        # the states of the rest are cut off.
        if self.top is not None:
            states = self.top(states, lengths)
            # a recording that fills the window has hardly any silence after it, so nothing is cut off
            cut = lengths < self.max_frames
            lengths = lengths - cut * round((SILENCE_MARGIN - STATES_TAIL) * STATES_PER_SECOND)
            states = states[:, : int(lengths.max())]
        if self.training:
            lost = torch.rand(len(states), 1, states.shape[-1]) < self.options.channels
            states = states.masked_fill(lost.to(states.device), 0.0)
        return self.head(states, lengths)

    def draw_spans(self, batch: CtcBatch) -> Tensor:
        """Draw the random spans of states to mask.

        Returns:
            (B, S) bool, True where a state is masked.
        """
        rows, size, _ = batch.states.shape
        begins = (torch.rand(rows, self.options.time_masks, 1) * batch.lengths.cpu()[:, None, None]).long()
        spans = torch.randint(0, self.options.mask_states + 1, (rows, self.options.time_masks, 1))
        steps = torch.arange(size)
        return ((steps >= begins) & (steps < begins + spans)).any(1)

    def training_step(self, batch: CtcBatch, batch_idx: int) -> Tensor:
        logits, lengths = self(batch)
        loss = ctc_loss(logits, lengths, batch.pieces, batch.piece_lengths)
        self.log("train/ctc", loss.detach(), batch_size=len(batch.rows), sync_dist=True)
        self.log("step", float(self.global_step))
        return loss

    def validation_step(self, batch: CtcBatch, batch_idx: int) -> None:
        logits, lengths = self(batch)
        loss = ctc_loss(logits, lengths, batch.pieces, batch.piece_lengths)
        self.log("dev/ctc", loss, batch_size=len(batch.rows), sync_dist=True)
        counts = batch.piece_lengths.tolist()
        expected = [row[:count] for row, count in zip(batch.pieces.tolist(), counts, strict=True)]
        written = collapse(logits.argmax(-1), lengths)
        wrong = sum(map(phone_distance, expected, written))
        self.log("dev/wrong", wrong / sum(counts), batch_size=sum(counts), sync_dist=True)

    def optimizer(self) -> Optimizer:
        named, options = self.head.named_parameters(), self.options
        tuned = [] if self.top is None else groups(self.top.parameters(), options.weight_decay)
        slow = [{**group, "lr": options.top_lr} for group in tuned]
        return MuonAdamW.for_parameters(
            named, lambda name, _: name.startswith("blocks"), options.lr, options.weight_decay, extra_groups=slow
        )


def load_module(checkpoints: Sequence[Path]) -> tuple[CtcModule, int]:
    """Load a CTC module with the mean of its checkpoints' weights.

    Returns:
        The module, and the training step of the last checkpoint.
    """
    return load_averaged(CtcModule, checkpoints)


@dataclass(frozen=True)
class CtcRecogniser:
    """A CTC speech recogniser: a head and the frozen encoder that it was trained on.

    Calling it with a sound file returns logits (1, F, V) for F output frames and V pieces, and the number of frames
    (1,).
    """

    head: CtcHead
    encoder: FrozenEncoder

    @torch.inference_mode()
    def __call__(self, path: Path) -> tuple[Tensor, Tensor]:
        return self.head(*self.encoder.encode([load_audio(path)], STATES_TAIL))


def load_ctc_recogniser(checkpoint: Path, encoder: str) -> CtcRecogniser:
    """Load a CTC head and its encoder.

    Args:
        checkpoint: A training checkpoint, or the folder of a speech translator that has a CTC head.
        encoder: Name or folder of the encoder.

    Raises:
        InputError: For damaged files.
    """
    speech_encoder = load_speech_encoder(encoder)
    if checkpoint.is_dir():
        return CtcRecogniser(load_piece_translator(checkpoint).model.head.eval(), speech_encoder)
    module, _ = load_module([checkpoint])
    if module.top is not None:
        # a checkpoint has trained encoder layers only if the encoder is a Whisper
        assert isinstance(speech_encoder, WhisperSpeechEncoder)
        speech_encoder = WhisperSpeechEncoder(module.top.give(speech_encoder.encoder))
    return CtcRecogniser(module.head, speech_encoder)
