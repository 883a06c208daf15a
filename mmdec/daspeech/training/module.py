"""Training of DASpeech: first speech to phones, then jointly with the acoustic model.

Phones are predicted by the graph decoder, in parallel, and by the autoregressive decoder. The graph decoder predicts a
directed acyclic graph, whose vertices emit phones (DA-Transformer).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mmdec.checks.weights import read_weights
from mmdec.daspeech.dag_decoder import DagDecoder, Lattice
from mmdec.daspeech.model import DASpeech, DASpeechConfig, SpeechToUnits
from mmdec.daspeech.training.acoustic import distributed_loss
from mmdec.daspeech.training.data import SpeechBatch, SpeechTranslationData
from mmdec.daspeech.units import BOS, EOS, PAD
from mmdec.errors import InputError
from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.int8 import unpack_rows
from mmdec.training.metrics.text import phone_distance
from mmdec.training.module import RecipeModule
from mmdec.training.optim import groups, token_weight


@dataclass(frozen=True)
class Augmentation:
    """Augments a padded batch with SpecAugment masks (Park et al. 2019) and warps.

    Random numbers are drawn from torch's global generator. The defaults are those of the DASpeech paper: always one
    frequency mask (F=27) and one time mask (T=100), and no warp. Warps imitate other voices and another speaking rate;
    they help on corpora with few speakers.
    """

    frequency_width: int = 27  # largest width of a frequency mask, in mel bands
    frequency_masks: int = 1  # number of frequency masks in each utterance
    time_width: int = 100  # largest length of a time mask, in frames
    time_masks: int = 1  # number of time masks in each utterance
    frequency_warp: float = 0.0  # largest relative stretch of the frequency axis; 0: none
    time_warp: float = 0.0  # largest relative change of speaking rate; 0: none

    def __call__(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Augment features (B, N, 80) of lengths (B,) in frames.

        Returns:
            New features and lengths; padding stays zero.
        """
        if self.time_warp or self.frequency_warp:
            features, lengths = self._warp(features, lengths)
        b, n, bands = features.shape
        keep = lengths_to_mask(lengths, n)[..., None]
        bins = torch.arange(bands, device=features.device)[None]
        for _ in range(self.frequency_masks):
            width = torch.rand(b, 1, device=features.device) * self.frequency_width
            start = torch.rand(b, 1, device=features.device) * (bands - width)
            keep = keep & ~((bins >= start) & (bins < start + width))[:, None]
        frames = torch.arange(n, device=features.device)[None]
        for _ in range(self.time_masks):
            # A mask hides at most a fifth of an utterance. (torchaudio's masks ignore the rows' lengths.)
            bound = (lengths[:, None] * 0.2).clamp(max=self.time_width)
            width = torch.rand(b, 1, device=features.device) * bound
            start = torch.rand(b, 1, device=features.device) * (lengths[:, None] - width)
            keep = keep & ~((frames >= start) & (frames < start + width))[..., None]
        return features * keep, lengths  # masked values become 0, which is the mean of the features

    def _warp(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Resample the time axis and the frequency axis in one bilinear interpolation.

        The factors are random for each row. Returns features (B, N', 80) and lengths (B,).
        """
        b, n, bands = features.shape
        device = features.device
        pace = 1 + (2 * torch.rand(b, device=device) - 1) * self.time_warp
        stretch = 1 + (2 * torch.rand(b, device=device) - 1) * self.frequency_warp
        new_lengths = (lengths / pace).floor().to(torch.long).clamp(min=8)
        size = int(new_lengths.max())
        rows = torch.arange(size, device=device)[None] * (lengths - 1)[:, None] / (new_lengths - 1)[:, None]
        y = rows * 2 / max(n - 1, 1) - 1  # (B, N'), from -1 to 1, as grid_sample needs it
        columns = (torch.arange(bands, device=device)[None] * stretch[:, None]).clamp(max=bands - 1)
        x = columns * 2 / (bands - 1) - 1  # shape (B, 80)
        grid = torch.stack([x[:, None].expand(-1, size, -1), y[..., None].expand(-1, -1, bands)], dim=-1)
        warped = F.grid_sample(features[:, None], grid, align_corners=True, padding_mode="border")[:, 0]
        return warped * lengths_to_mask(new_lengths, size)[..., None], new_lengths


@dataclass(frozen=True)
class GraphLoss:
    """The graph loss of a batch of B sentences with M target tokens and L graph vertices, and values that logs need."""

    value: Tensor  # scalar, the mean over the sentences
    invalid: Tensor  # number of sentences whose likelihood is not finite; they add 0 to `value`
    match: Tensor  # (B, M, L) log-probability that vertex l emits target token m


def graph_loss(lattice: Lattice, units: Tensor, unit_lengths: Tensor, forced: Tensor | None = None) -> GraphLoss:
    """Compute the graph loss: -log P(Y|X) / M, averaged over the sentences (DASpeech, section 3.1).

    M is a target's length.

    A sentence whose log P(Y|X) is not finite (its target may not fit in the graph) adds 0, and is counted in `invalid`.

    Args:
        lattice: The graph decoder's output, with L vertices.
        units: (B, M) target tokens, padded.
        unit_lengths: (B,).
        forced: (B, L) index of the target token that GLAT showed to a vertex, or -1. Such a vertex emits its token with
            probability 1, without a gradient. None: nothing was shown.
    """
    match = lattice.matches(units)
    if forced is not None:
        steps = torch.arange(units.shape[1], device=units.device)[None, :, None]
        shown = forced[:, None, :]  # shape (B, 1, L)
        match = torch.where(shown < 0, match, torch.where(shown == steps, 0.0, -torch.inf))
    score = lattice.marginal(match, unit_lengths)
    valid = score.isfinite()
    value = -(torch.where(valid, score, 0.0) / unit_lengths).mean() * row_weight(units)
    return GraphLoss(value, (~valid).sum(), match)


@torch.no_grad()
def glance(
    decoder: DagDecoder,
    states: Tensor,
    state_lengths: Tensor,
    frame_lengths: Tensor,
    units: Tensor,
    unit_lengths: Tensor,
    ratio: float,
) -> tuple[Tensor, Tensor]:
    """Run GLAT's first decoder pass, and choose the vertices to which the second pass shows their target token.

    Vertices are drawn at random from the best path for the target (GLAT's strategy "number-random"). Their number is
    `ratio` times the number of target tokens that this pass predicts wrong on this path. The second pass draws the same
    dropout.

    Args:
        decoder: The graph decoder.
        states: (B, S, H) encoder states.
        state_lengths: (B,) numbers of states.
        frame_lengths: (B,) lengths that set the graphs' sizes.
        units: (B, M) target tokens, padded.
        unit_lengths: (B,) numbers of target tokens.
        ratio: Factor on the number of wrong tokens.

    Returns:
        `given` (B, L), for the second pass: the token shown to each vertex, or -1. `forced` (B, L), for `graph_loss`:
        the index of this token in the target, or -1.
    """
    devices = [states.device] if states.is_cuda else []
    with torch.random.fork_rng(devices):  # the random state is restored, so that the second pass draws the same dropout
        lattice = decoder(states, state_lengths, frame_lengths)
        noise = torch.rand(lattice.logits.shape[:2], device=states.device)
    path = lattice.best_alignment(lattice.matches(units), unit_lengths)  # shape (B, L)
    aligned = path >= 0
    gold = torch.where(aligned, units.gather(1, path.clamp(min=0)), -1)
    correct = ((lattice.logits.argmax(-1) == gold) & aligned).sum(1)
    count = (ratio * (unit_lengths - correct)).round().clamp(min=0)
    order = torch.where(aligned, noise, 2.0).argsort(1).argsort(1)
    chosen = aligned & (order < count[:, None])
    return torch.where(chosen, gold, -1), torch.where(chosen, path, -1)


def autoregressive_loss(logits: Tensor, units: Tensor, label_smoothing: float) -> Tensor:
    """Compute the cross-entropy of logits (B, M-1, V) with target tokens (B, M).

    The first target token, <s>, and padding are ignored.
    """
    target = units[:, 1:]
    mean = F.cross_entropy(logits.float().transpose(1, 2), target, ignore_index=PAD, label_smoothing=label_smoothing)
    return mean * token_weight((target != PAD).sum())


def ctc_loss(logits: Tensor, lengths: Tensor, text: Tensor, text_lengths: Tensor) -> Tensor:
    """Compute the CTC loss per target symbol, averaged over the sentences.

    A text that is too long for its frames counts as 0.

    Args:
        logits: (B, S, C); class 0 is the blank.
        lengths: (B,) number of frames.
        text: (B, T) classes, padded.
    """
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, text, lengths, text_lengths, zero_infinity=True) * row_weight(text)


def row_weight(rows: Tensor) -> Tensor:
    """Return the factor for this process's mean over its B sentences.

    With it, the average over all processes is the mean over all sentences.

    Args:
        rows: Any tensor (B, ...).
    """
    return token_weight(torch.tensor(len(rows), device=rows.device))


def glat_ratio(options: Any, step: int) -> float:
    """Return GLAT's ratio at a training step: the share of wrong target tokens that are shown to the graph decoder.

    It goes linearly from `glat_start` to `glat_end` in `glat_steps` steps.

    Args:
        options: An object with these three fields.
        step: The training step.
    """
    part = min(1.0, step / max(options.glat_steps, 1))
    return options.glat_start + part * (options.glat_end - options.glat_start)


SIZES = {"paper": DASpeechConfig, "small": DASpeechConfig.small}


@dataclass(frozen=True)
class DASpeechOptions:
    """Options of `DASpeechModule` that a recipe (YAML file) sets.

    The defaults are the paper's recipe for the stage of speech to phones (Adam .9/.999, 5e-4, warm-up 10k,
    inverse-sqrt, GLAT .5 to .1 over 100k updates). One loss is added: `ar_weight` times the loss of an autoregressive
    decoder on the same encoder. With `ar_weight` 0 this loss is left out, as in the paper.

    Args:
        size: Name of the network's sizes.
        model: Sizes that differ from these, by dotted name, such as {"dag.layers": 2}.
        warmup: Steps in which the learning rate rises.
        decay_from: Step from which it falls.
        decay_steps: Steps in which it falls.
    """

    size: Literal["paper", "small"] = "paper"
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    warmup: int = 10_000
    schedule: Literal["inverse-sqrt", "trapezoid"] = "inverse-sqrt"
    decay_from: int | None = None
    decay_steps: int = 1000
    dropout: float = 0.1
    glat_start: float = 0.5
    glat_end: float = 0.1
    glat_steps: int = 100_000
    ar_weight: float = 1.0
    ctc_weight: float = 0.0
    label_smoothing: float = 0.1
    mu: float = 0.0
    posterior: Literal["paper", "released"] = "paper"
    embedding_share: float = 0.0
    model: dict[str, Any] | None = None
    seed: int = 0

    def network(self) -> DASpeechConfig:
        """Return the network's sizes: those of `size`, with the changes of `model`."""
        config = SIZES[self.size]().to_dict()
        for part in ("encoder", "dag", "ar"):
            config[part]["dropout"] = self.dropout
        for name, value in (self.model or {}).items():
            part, _, key = name.partition(".")
            if key:
                config[part][key] = value
            else:
                config[part] = value
        return DASpeechConfig.from_dict(config)


class DASpeechModule(RecipeModule):
    """Trains DASpeech with the loss L = L_DAG + ar_weight L_AR + ctc_weight L_CTC + mu L_TTS.

    With `mu` 0 (first stage), there is no acoustic model. With `mu` > 0 (joint training; 5 in the paper), the acoustic
    model reads the expected hidden states of the graph's vertices under the `posterior`. It reads phone embeddings
    instead for a random share `embedding_share` of the rows, and for rows that do not fit in their graph. So it can
    also speak the phones of the autoregressive decoder.

    Args:
        units: The vocabulary of phones, ordered by id.
        options: Fields of `DASpeechOptions`.
    """

    options: DASpeechOptions

    def __init__(self, units: list[str], augmentation: Augmentation | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["augmentation"])
        self.use_options(DASpeechOptions(**options))
        self.config = self.options.network()
        kind = DASpeech if self.options.mu > 0 else SpeechToUnits
        self.network: SpeechToUnits = kind(self.config, len(units))
        self.augmentation = augmentation or Augmentation()

    def setup(self, stage: str) -> None:
        """Check that data module and model have the same graph size, because the data module leaves out other rows."""
        data, dag = self.trainer.datamodule, self.config.dag  # type: ignore[attr-defined] # not declared by Lightning
        if not isinstance(data, SpeechTranslationData):
            return
        for name, expected, value in (
            ("upsample", dag.upsample, data.upsample),
            ("min_vertices", dag.min_vertices, data.min_vertices),
        ):
            if expected != value:
                raise InputError(
                    f"`{name}` of the data must be the model's, {expected}, but is {value}. Set both in the recipe."
                )

    def losses(self, batch: SpeechBatch) -> dict[str, Tensor]:
        """Compute a batch's losses.

        Returns:
            By name: "dag" (graph), "ar" (autoregressive), optionally "ctc" and "tts", and "loss", their weighted sum.
            "invalid" is the number of sentences without a finite graph loss.
        """
        net = self.network
        features, lengths = batch.features, batch.lengths
        if self.training:
            features, lengths = self.augmentation(features, lengths)
        states, state_lengths, middle = net.encoder(features, lengths, self.config.ctc_layer)
        revealed = forced = None
        ratio = glat_ratio(self.options, self.global_step) if self.training else 0.0
        if ratio > 0:
            revealed, forced = glance(
                net.decoder, states, state_lengths, lengths, batch.units, batch.unit_lengths, ratio
            )
        lattice = net.decoder(states, state_lengths, lengths, revealed)
        graph = graph_loss(lattice, batch.units, batch.unit_lengths, forced)
        parts = {"dag": graph.value, "invalid": graph.invalid.float()}
        logits = net.autoregressive(batch.units[:, :-1], states, state_lengths)
        parts["ar"] = autoregressive_loss(logits, batch.units, self.options.label_smoothing)
        parts["loss"] = parts["dag"] + self.options.ar_weight * parts["ar"]
        if net.ctc is not None:
            parts["ctc"] = ctc_loss(net.ctc(middle), state_lengths, batch.text, batch.text_lengths)
            parts["loss"] = parts["loss"] + self.options.ctc_weight * parts["ctc"]
        if self.options.mu > 0:
            parts["tts"] = self.acoustic_loss(batch, lattice, graph.match)
            parts["loss"] = parts["loss"] + self.options.mu * parts["tts"]
        return parts

    def acoustic_loss(self, batch: SpeechBatch, lattice: Lattice, match: Tensor) -> Tensor:
        """Compute FastSpeech 2's loss.

        Its input is each phone's expected hidden state (DASpeech, section 3.3).

        The state of phone i is z_i = sum_j P(a_i = j | X, Y) v_j: the mean of the vertices' states v_j, weighted by the
        probability that phone i is on vertex j. Gradients reach the states v_j, but not P.

        Args:
            match: (B, M, L) log-probability that vertex l emits target token m.
        """
        net, targets = self.network, batch.acoustic
        if not isinstance(net, DASpeech) or targets is None:
            raise InputError(
                "`acoustic` of the data must be true in the joint stage, but is false. Set it in the recipe."
            )
        posterior = lattice.posterior(match, batch.unit_lengths, self.options.posterior)
        # The first token, <s>, is removed; </s> stays, with no frames.
        expected = lattice.expected_states(posterior)[:, 1:]
        inputs = net.acoustic_input(expected)
        # If a target does not fit in its graph, there is no path and no expected state: use phone embeddings.
        plain = (posterior.flatten(1).sum(1) == 0)[:, None, None]
        share = self.options.embedding_share
        if share > 0:
            plain |= torch.rand(len(inputs), 1, 1, device=inputs.device) < share
        inputs = torch.where(plain, net.tts.embed(batch.units[:, 1:]).to(inputs.dtype), inputs)
        lengths = batch.unit_lengths - 1
        output = net.tts(inputs, lengths, targets.durations, targets.pitch, targets.energy)
        return distributed_loss(output, targets, net.tts).total

    def training_step(self, batch: SpeechBatch, batch_idx: int) -> Tensor:
        parts = self.losses(batch)
        values = {f"train/{name}": value.detach() for name, value in parts.items()}
        self.log_dict(values, batch_size=len(batch.rows), sync_dist=True)
        return parts["loss"]

    def validation_step(self, batch: SpeechBatch, batch_idx: int) -> None:
        net = self.network
        states, state_lengths = net.encode(batch.features, batch.lengths)
        lattice = net.lattice(states, state_lengths, batch.lengths)
        path = lattice.path("lookahead")
        limit = int(lattice.lengths.max())
        outputs = {
            "dag": [[unit for unit in row if unit not in (-1, BOS, PAD, EOS)] for row in path.tokens.tolist()],
            "ar": net.autoregressive.generate(states.float(), state_lengths, limit),
        }
        gold = [[unit for unit in row if unit not in (BOS, PAD, EOS)] for row in batch.units.tolist()]
        size = len(gold)
        length = torch.tensor(float(sum(map(len, gold))))
        for name, rows in outputs.items():
            errors = sum(phone_distance(a, b) for a, b in zip(rows, gold, strict=True))
            exact = sum(a == b for a, b in zip(rows, gold, strict=True)) / size
            self.log(f"dev/{name}_per", errors / length, batch_size=int(length), sync_dist=True, on_epoch=True)
            self.log(f"dev/{name}_exact", exact, batch_size=size, sync_dist=True, on_epoch=True)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by norm.

        Lightning refuses this for fused optimizers in mixed precision; here it is safe, because bf16 needs no gradient
        scaling.
        """
        if gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def optimizer(self) -> Optimizer:
        options = self.options
        parameters = groups(self.network.parameters(), options.weight_decay)
        first, second = options.betas
        return torch.optim.AdamW(parameters, lr=options.lr, betas=(first, second), fused=True)


def load_matching_weights(network: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """Load the weights that fit by name and shape.

    Returns:
        The names of the network's weights that were not loaded.
    """
    shapes = network.state_dict()
    fitting = {name: value for name, value in state.items() if name in shapes and shapes[name].shape == value.shape}
    network.load_state_dict(fitting, strict=False)
    return sorted(set(shapes) - set(fitting))


class InitialWeights(Callback):
    """Loads safetensors files into the network before a new training.

    A resumed training keeps its checkpoint's weights.

    Weights are loaded if name and shape fit; all others keep their initial values.

    Args:
        files: Weights with the network's names.
        acoustic: Weights of a trained acoustic model (tts.safetensors).

    Raises:
        InputError: If a file is missing or none of its tensors fits.
    """

    def __init__(self, files: Sequence[str], acoustic: str | None = None) -> None:
        self.files = [(Path(file), "") for file in files]
        if acoustic is not None:
            # the acoustic model's weights have the prefix "tts." in the whole network
            self.files.append((Path(acoustic), "tts."))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.ckpt_path:
            return
        for file, prefix in self.files:
            if not file.is_file():
                raise InputError(
                    f"`files` must name existing safetensors, but '{file}' does not exist. Train it first."
                )
            state = {
                prefix + name: value for name, value in unpack_rows(read_weights([file], "files"), "files").items()
            }
            # typed as `Any`, because type checkers take a module's attributes for tensors
            network: Any = pl_module.network
            if prefix:
                self._reorder(state, network.state_dict(), pl_module.hparams["units"], file.with_suffix(".json"))
            left = load_matching_weights(network, state)
            loaded_count = len(network.state_dict()) - len(left)
            if loaded_count == 0:
                raise InputError(f"`files` must fit the network, but no tensor of '{file}' does. Check the sizes.")
            rank_zero_info(f"{file}: {loaded_count} tensors loaded")

    def _reorder(self, state: dict[str, Tensor], parameters: dict[str, Tensor], units: list[str], path: Path) -> None:
        """Put the acoustic model's phone embeddings in the order of this network's phones.

        A phone that is new keeps its initial embedding.

        Args:
            state: The acoustic model's weights, changed in place.
            parameters: This network's weights.
            units: This network's phones.
            path: The acoustic model's tts.json, which lists its phones.
        """
        earlier = json.loads(path.read_text(encoding="utf-8"))["units"]
        rows = parameters["tts.units.weight"].clone()
        for index, unit in enumerate(units):
            if unit in earlier:
                rows[index] = state["tts.units.weight"][earlier.index(unit)]
        state["tts.units.weight"] = rows
