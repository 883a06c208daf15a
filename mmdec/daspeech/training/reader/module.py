"""Training of a text translator: the reader (an encoder of source pieces) and its two decoders of target pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mmdec.daspeech.ar_decoder import ArConfig
from mmdec.daspeech.dag_decoder import DagConfig
from mmdec.daspeech.piece_reader import PiecesToUnits, ReaderConfig, unit_limits
from mmdec.daspeech.training.module import autoregressive_loss, glance, glat_ratio, graph_loss, load_matching_weights
from mmdec.daspeech.training.reader.data import PairBatch, PairData
from mmdec.training.checkpoints import load_averaged, read_start
from mmdec.training.metrics.text import bleu, chrf
from mmdec.training.module import RecipeModule
from mmdec.training.optim import MuonAdamW


@dataclass(frozen=True)
class ReaderOptions:
    """Options of `ReaderModule` that a recipe (YAML file) sets.

    The graph decoder decodes in parallel: it predicts a directed acyclic graph of tokens (DA-Transformer).

    Args:
        graph_layers: Number of layers of the graph decoder; 0: no graph decoder.
        vertices: Number of graph vertices for each source piece.
        min_vertices: The least number of vertices in a sentence.
        ar_weight: Weight of the autoregressive loss. 0: only the graph decoder is trained; the rest is frozen.
        glat_start: The share of the wrong target tokens that GLAT shows the graph decoder at first.
        glat_end: The share to which it falls, linearly.
        glat_steps: The number of training steps in which it falls.
        start: A checkpoint, or a speech translator's folder, to begin from. If `start` has no graph decoder, the new
            graph decoder begins with the layers of the autoregressive decoder.
        warmup: Number of training steps in which the learning rate rises.
        decay_from: Step from which it falls linearly to zero.
        decay_steps: Number of steps in which it falls.
    """

    d_model: int = 256
    ffn: int = 1024
    heads: int = 4
    layers: int = 6
    decoder_layers: int = 4
    graph_layers: int = 0
    vertices: float = 4.0
    min_vertices: int = 16
    ar_weight: float = 1.0
    glat_start: float = 0.5
    glat_end: float = 0.1
    glat_steps: int = 10_000
    start: str | None = None
    dropout: float = 0.1
    lr: float = 1.5e-3
    weight_decay: float = 0.01
    warmup: int = 400
    decay_from: int | None = None
    decay_steps: int = 1000
    label_smoothing: float = 0.1
    seed: int = 0


class ReaderModule(RecipeModule):
    """Trains the text translator with the loss ar_weight L_AR + L_graph.

    L_AR is the cross-entropy of the autoregressive decoder. L_graph is the negative log-likelihood of the target pieces
    in the graph decoder's graph, per piece.

    Args:
        units: The source pieces and the target pieces, each ordered by id.
        options: Fields of `ReaderOptions`.
    """

    options: ReaderOptions

    def __init__(self, units: list[list[str]], **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.use_options(ReaderOptions(**options))
        torch.manual_seed(self.options.seed)
        sizes = {name: getattr(self.options, name) for name in ("d_model", "ffn", "heads", "dropout")}
        self.network = PiecesToUnits(
            ReaderConfig(
                len(units[0]),
                len(units[1]),
                **sizes,
                layers=self.options.layers,
                ar=ArConfig(**sizes, layers=self.options.decoder_layers),
                dag=self.graph(sizes),
            )
        )
        if self.options.start is not None:
            missing = load_matching_weights(self, read_start(Path(self.options.start), "network."))
            if self.network.decoder is not None and any("network.decoder.layers." in name for name in missing):
                load_matching_weights(self.network.decoder, self.network.ar.state_dict())
        if not self.options.ar_weight:
            self.network.reader.requires_grad_(False)
            self.network.ar.requires_grad_(False)
        self.outputs: dict[str, dict[int, list[int]]] = {}

    def graph(self, sizes: dict[str, Any]) -> DagConfig | None:
        """Return the graph decoder's configuration; None if there is no graph decoder.

        Args:
            sizes: The autoregressive decoder's sizes by name, which the graph decoder shares.
        """
        if not self.options.graph_layers:
            return None
        links = {"link_heads": 4, "link_dim": sizes["d_model"] // 4, "link_prior": True}
        form = {"positions": "sinusoidal", "copy_encoder": True}
        vertices = {"upsample": self.options.vertices, "min_vertices": self.options.min_vertices}
        return DagConfig(**sizes, layers=self.options.graph_layers, **links, **form, **vertices)

    def losses(self, batch: PairBatch) -> dict[str, Tensor]:
        """Compute the losses of a batch by name: "ar" (autoregressive), "dag" (graph), and "loss", their weighted sum.

        "invalid" is the number of sentences whose target does not fit in the graph.
        """
        net, trained = self.network, self.options.ar_weight > 0
        parts: dict[str, Tensor] = {"loss": torch.zeros((), device=batch.pieces.device)}
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            states = net.reader(batch.pieces, batch.weights, batch.lengths)
        if trained or not self.training:
            logits = net.autoregressive(batch.units[:, :-1], states, batch.lengths)
            smoothing = self.options.label_smoothing if self.training else 0.0
            parts["ar"] = autoregressive_loss(logits, batch.units, smoothing)
            parts["loss"] = self.options.ar_weight * parts["ar"]
        if net.decoder is not None:
            arguments = (net.decoder, states, batch.lengths, batch.lengths)
            revealed = forced = None
            ratio = glat_ratio(self.options, self.global_step) if self.training else 0.0
            if ratio > 0:
                revealed, forced = glance(*arguments, batch.units, batch.unit_lengths, ratio)
            lattice = net.decoder(*arguments[1:], revealed)
            graph = graph_loss(lattice, batch.units, batch.unit_lengths, forced)
            parts |= {"dag": graph.value, "invalid": graph.invalid.float()}
            parts["loss"] = parts["loss"] + graph.value
        return parts

    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        parts = self.losses(batch)
        values = {f"train/{name}": value.detach() for name, value in parts.items()}
        self.log_dict(values, batch_size=len(batch.rows), sync_dist=True)
        self.log("step", float(self.global_step))
        return parts["loss"]

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        parts = self.losses(batch)
        self.log_dict({f"dev/{name}": v for name, v in parts.items()}, batch_size=len(batch.rows), sync_dist=True)
        net = self.network
        states = net.reader(batch.pieces, batch.weights, batch.lengths).float()
        written = {"ar": net.autoregressive.generate(states, batch.lengths, max(unit_limits(batch.lengths)))}
        if net.decoder is not None:
            path = net.decoder(states, batch.lengths, batch.lengths).path("lookahead", collapse=True)
            written["dag"] = [[unit for unit in row if unit >= 0] for row in path.tokens.tolist()]
        for name, rows in written.items():
            self.outputs.setdefault(name, {}).update(zip(batch.rows, rows, strict=True))

    def on_validation_epoch_end(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined] # not declared by Lightning
        for name, written in self.outputs.items():
            if isinstance(data, PairData):
                texts = [data.english.decode(written[row]) for row in sorted(written)]
                references = [data.dev[row].references for row in sorted(written)]
                self.log(f"dev/{name}_bleu", bleu(texts, references).value)
                self.log(f"dev/{name}_chrf", chrf(texts, references).value)
        self.outputs = {}

    def optimizer(self) -> Optimizer:
        named, options = self.network.named_parameters(), self.options
        return MuonAdamW.for_parameters(named, lambda name, _: "embed" not in name, options.lr, options.weight_decay)


def load_module(checkpoints: Sequence[Path]) -> tuple[ReaderModule, int]:
    """Load a text translator's training module with the mean of its checkpoints' weights.

    Returns:
        The module, and the training step of the last checkpoint.
    """
    return load_averaged(ReaderModule, checkpoints)
