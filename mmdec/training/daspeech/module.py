"""Training of DASpeech: first speech to phones (graph and autoregressive decoder), then jointly with the acoustic
model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.checks.weights import read_weights
from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.dag_decoder import BOS, EOS, PAD, DagDecoder, Lattice
from mmdec.nn.daspeech import DASpeech, DASpeechConfig, SpeechToUnits
from mmdec.nn.int8 import unpack_rows
from mmdec.training.checkpoints import keep_options
from mmdec.training.daspeech.acoustic import shared_loss
from mmdec.training.daspeech.corpus import Batch, SpeechTranslationData
from mmdec.training.metrics.text import phone_distance
from mmdec.training.optim import Schedule, groups, scheduled, token_weight
from mmdec.types import InputError


@dataclass(frozen=True)
class Augmentation:
    """Augments a padded batch by SpecAugment masks (Park et al. 2019) and warps, from torch's global generator.

    The defaults are DASpeech's: always one frequency mask (F=27) and one time mask (T=100), and no warp. Warps imitate
    other voices and another pace; they help on corpora with few speakers.
    """

    frequency_width: int = 27  # the widest frequency mask, in mel bands
    frequency_masks: int = 1  # number of masks in each row
    time_width: int = 100  # the longest time mask, in frames
    time_masks: int = 1  # number of masks in each row
    frequency_warp: float = 0.0  # the largest relative stretch of the frequency axis
    time_warp: float = 0.0  # the largest relative change of pace

    def __call__(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Augment features (B, N, 80) of lengths (B,). Returns features and lengths; padding stays zero."""
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
            # A mask hides at most a fifth of a short utterance. (torchaudio's masks do not know each row's length.)
            bound = (lengths[:, None] * 0.2).clamp(max=self.time_width)
            width = torch.rand(b, 1, device=features.device) * bound
            start = torch.rand(b, 1, device=features.device) * (lengths[:, None] - width)
            keep = keep & ~((frames >= start) & (frames < start + width))[..., None]
        return features * keep, lengths  # features have zero mean: a mask is the average frame

    def _warp(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Resample time and frequency in one bilinear look-up, with a random pace and stretch for each row."""
        b, n, bands = features.shape
        device = features.device
        pace = 1 + (2 * torch.rand(b, device=device) - 1) * self.time_warp
        stretch = 1 + (2 * torch.rand(b, device=device) - 1) * self.frequency_warp
        new_lengths = (lengths / pace).floor().to(torch.long).clamp(min=8)
        size = int(new_lengths.max())
        rows = torch.arange(size, device=device)[None] * (lengths - 1)[:, None] / (new_lengths - 1)[:, None]
        y = rows * 2 / max(n - 1, 1) - 1  # (B, N'), in grid_sample's coordinates
        columns = (torch.arange(bands, device=device)[None] * stretch[:, None]).clamp(max=bands - 1)
        x = columns * 2 / (bands - 1) - 1  # (B, 80)
        grid = torch.stack([x[:, None].expand(-1, size, -1), y[..., None].expand(-1, -1, bands)], dim=-1)
        warped = F.grid_sample(features[:, None], grid, align_corners=True, padding_mode="border")[:, 0]
        return warped * lengths_to_mask(new_lengths, size)[..., None], new_lengths


@dataclass(frozen=True)
class GraphLoss:
    """The graph loss of a batch, and values that other losses and logs use."""

    value: Tensor  # scalar
    invalid: Tensor  # number of rows left out: the target does not fit the graph, or the likelihood is not finite
    match: Tensor  # (B, M, L) log-probability of the m-th target token at vertex l


def graph_loss(lattice: Lattice, units: Tensor, unit_lengths: Tensor, forced: Tensor | None = None) -> GraphLoss:
    """Compute the graph loss: the mean over rows of -log P(Y|X) / M (DASpeech, section 3.1).

    A row whose log P(Y|X) is not finite adds 0 to the mean and is counted in `invalid`.
    units: (B, M) target tokens, padded. unit_lengths: (B,) their number in each row.
    forced: (B, L) index of the target token that GLAT showed to a vertex; -1: none was shown. A vertex emits its shown
        token with probability 1, without a gradient.
    """
    match = lattice.matches(units)
    if forced is not None:
        steps = torch.arange(units.shape[1], device=units.device)[None, :, None]
        shown = forced[:, None, :]  # (B, 1, L)
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
    """Run GLAT's first decoder pass, and choose vertices that are shown their target token ("number-random").

    The number of shown tokens is ratio x (the target's tokens - those that this pass predicts right on the best path).
    The vertices are drawn at random from this path. The second pass will use the same dropout.
    Returns: `given` (B, L), the shown token or -1, for the decoder's second pass; `forced` (B, L), the token's index in
        the target or -1, for `graph_loss`.
    """
    devices = [states.device] if states.is_cuda else []
    with torch.random.fork_rng(devices):  # restores the generator, so that the second pass draws the same dropout
        lattice = decoder(states, state_lengths, frame_lengths)
        noise = torch.rand(lattice.logits.shape[:2], device=states.device)
    path = lattice.best_alignment(lattice.matches(units), unit_lengths)  # (B, L)
    aligned = path >= 0
    gold = torch.where(aligned, units.gather(1, path.clamp(min=0)), -1)
    right = ((lattice.logits.argmax(-1) == gold) & aligned).sum(1)
    count = (ratio * (unit_lengths - right)).round().clamp(min=0)
    order = torch.where(aligned, noise, 2.0).argsort(1).argsort(1)
    chosen = aligned & (order < count[:, None])
    return torch.where(chosen, gold, -1), torch.where(chosen, path, -1)


def autoregressive_loss(logits: Tensor, units: Tensor, label_smoothing: float) -> Tensor:
    """Compute the cross-entropy of logits (B, M-1, V) with the units (B, M) that follow <s>. Padding is ignored."""
    target = units[:, 1:]
    mean = F.cross_entropy(logits.float().transpose(1, 2), target, ignore_index=PAD, label_smoothing=label_smoothing)
    return mean * token_weight((target != PAD).sum())


def ctc_loss(logits: Tensor, lengths: Tensor, text: Tensor, text_lengths: Tensor) -> Tensor:
    """Compute the CTC loss for each target symbol, as a mean over rows. A row whose text is too long for its frames
    counts as 0. logits: (B, S, C), class 0 is the blank. lengths: (B,) frames. text: (B, T) classes, padded."""
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, text, lengths, text_lengths, zero_infinity=True) * row_weight(text)


def row_weight(rows: Tensor) -> Tensor:
    """Return the weight on this process's mean over rows (B, ...) that makes the processes' average a mean over all
    rows."""
    return token_weight(torch.tensor(len(rows), device=rows.device))


def glat_ratio(options: Any, step: int) -> float:
    """Return the share of the target that the graph decoder sees at a step: linear from `glat_start` to `glat_end` in
    `glat_steps` steps. options: holds these three fields."""
    part = min(1.0, step / max(options.glat_steps, 1))
    return options.glat_start + part * (options.glat_end - options.glat_start)


SIZES = {"paper": DASpeechConfig, "small": DASpeechConfig.small}


@dataclass(frozen=True)
class DASpeechOptions:
    """Options that a recipe sets. The defaults are the paper's recipe (S2TT stage: Adam .9/.999, 5e-4, warm-up 10k,
    inverse-sqrt, GLAT .5 to .1 over 100k updates), with one more loss, which trains the autoregressive baseline on the
    same encoder. `ar_weight` 0 leaves this loss out, as in the paper.

    model: sizes that differ from those of `size`, by dotted name ("dag.layers": 2).
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
        """Return the network's sizes: those of `size`, with the changes in `model`."""
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


class DASpeechModule(LightningModule):
    """Trains DASpeech with the loss L = L_DAG + ar_weight L_AR + ctc_weight L_CTC + mu L_TTS.

    With `mu` 0 (first stage) there is no acoustic model. With `mu` > 0 (joint stage; the paper's is 5) the acoustic
    model reads the expected hidden states of the graph under the `posterior`. For a share `embedding_share` of the
    rows, and for rows that do not fit their graph, it reads phone embeddings instead, so that the same voice can also
    speak the autoregressive baseline's phones.

    units: the vocabulary of phones, ordered by id. options: fields of `DASpeechOptions`. All randomness of a training
        step follows from (seed, epoch, step, rank).
    """

    def __init__(self, units: list[str], augmentation: Augmentation | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["augmentation"])
        self.options = DASpeechOptions(**options)
        keep_options(self, self.options)
        self.config = self.options.network()
        kind = DASpeech if self.options.mu > 0 else SpeechToUnits
        self.network: SpeechToUnits = kind(self.config, len(units))
        self.augmentation = augmentation or Augmentation()
        self.rate = Schedule(
            self.options.schedule, self.options.warmup, self.options.decay_from, self.options.decay_steps
        )

    def setup(self, stage: str) -> None:
        """Check that the data has the model's graph size, because it leaves out rows that do not fit the graph."""
        data, dag = self.trainer.datamodule, self.config.dag  # type: ignore[attr-defined] # undeclared by Lightning
        if not isinstance(data, SpeechTranslationData):
            return
        for name, wanted, value in (
            ("upsample", dag.upsample, data.upsample),
            ("min_vertices", dag.min_vertices, data.min_vertices),
        ):
            if wanted != value:
                raise InputError(
                    f"`{name}` of the data must be the model's, {wanted}, but is {value}. Set both alike in the recipe."
                )

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        seed = (self.options.seed * 100_003 + self.current_epoch) * 1_000_003 + batch_idx
        torch.manual_seed(seed * 64 + self.global_rank)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Compute a batch's losses by name; "loss" is their weighted sum. "invalid" is the number of rows left out."""
        net = self.network
        features, lengths = batch.features, batch.lengths
        if self.training:
            features, lengths = self.augmentation(features, lengths)
        states, state_lengths, middle = net.encoder(features, lengths, self.config.ctc_layer)
        given = forced = None
        ratio = glat_ratio(self.options, self.global_step) if self.training else 0.0
        if ratio > 0:
            given, forced = glance(net.decoder, states, state_lengths, lengths, batch.units, batch.unit_lengths, ratio)
        lattice = net.decoder(states, state_lengths, lengths, given)
        graph = graph_loss(lattice, batch.units, batch.unit_lengths, forced)
        parts = {"dag": graph.value, "invalid": graph.invalid.float()}
        logits = net.baseline(batch.units[:, :-1], states, state_lengths)
        parts["ar"] = autoregressive_loss(logits, batch.units, self.options.label_smoothing)
        parts["loss"] = parts["dag"] + self.options.ar_weight * parts["ar"]
        if net.ctc is not None:
            parts["ctc"] = ctc_loss(net.ctc(middle), state_lengths, batch.text, batch.text_lengths)
            parts["loss"] = parts["loss"] + self.options.ctc_weight * parts["ctc"]
        if self.options.mu > 0:
            parts["tts"] = self.acoustic_loss(batch, lattice, graph.match)
            parts["loss"] = parts["loss"] + self.options.mu * parts["tts"]
        return parts

    def acoustic_loss(self, batch: Batch, lattice: Lattice, match: Tensor) -> Tensor:
        """Compute FastSpeech 2's loss on each phone's expected hidden state z_i = sum_j P(a_i = j | X, Y) v_j: the mean
        of the vertices' states v_j, weighted by the probability that phone i is on vertex j (section 3.3). Only the
        states v_j get gradients, not P. match: (B, M, L), from `GraphLoss`."""
        net, targets = self.network, batch.acoustic
        if not isinstance(net, DASpeech) or targets is None:
            raise InputError(
                "`acoustic` of the data must be true in the joint stage, but is false. Set it in the recipe."
            )
        posterior = lattice.posterior(match, batch.unit_lengths, self.options.posterior)
        # <s> is removed; </s> stays, with no frames.
        expected = lattice.expected_states(posterior)[:, 1:]
        inputs = net.acoustic_input(expected)
        # A row whose target does not fit its graph has no path, and so no hidden states for the acoustic model.
        plain = (posterior.flatten(1).sum(1) == 0)[:, None, None]
        share = self.options.embedding_share
        if share > 0:
            plain |= torch.rand(len(inputs), 1, 1, device=inputs.device) < share
        inputs = torch.where(plain, net.tts.embed(batch.units[:, 1:]).to(inputs.dtype), inputs)
        lengths = batch.unit_lengths - 1
        output = net.tts(inputs, lengths, targets.durations, targets.pitch, targets.energy)
        return shared_loss(output, targets, net.tts).total

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        parts = self.losses(batch)
        values = {f"train/{name}": value.detach() for name, value in parts.items()}
        self.log_dict(values, batch_size=len(batch.rows), sync_dist=True)
        return parts["loss"]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        net = self.network
        states, state_lengths = net.encode(batch.features, batch.lengths)
        lattice = net.lattice(states, state_lengths, batch.lengths)
        path = lattice.path("lookahead")
        limit = int(lattice.lengths.max())
        outputs = {
            "dag": [[unit for unit in row if unit not in (-1, BOS, PAD, EOS)] for row in path.tokens.tolist()],
            "ar": net.baseline.generate(states.float(), state_lengths, limit),
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
        """Clip gradients by norm. Lightning refuses this for fused optimizers in mixed precision, but bf16 needs no
        gradient scaling."""
        if gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.options
        parameters = groups(self.network.parameters(), options.weight_decay)
        first, second = options.betas
        optimizer = torch.optim.AdamW(parameters, lr=options.lr, betas=(first, second), fused=True)
        return scheduled(optimizer, lambda step: self.rate(step))


def load_network(network: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """Load the weights that fit by name and shape. Returns the names that kept their initial values."""
    own = network.state_dict()
    fitting = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    network.load_state_dict(fitting, strict=False)
    return sorted(set(own) - set(fitting))


class InitialWeights(Callback):
    """Loads safetensors files into the network before a new run; a resumed run keeps its checkpoint's weights.

    The network's weights that no file fits by name and shape keep their initial values. The number of loaded tensors is
    logged. Raises InputError if a file is missing or none of its tensors fits.
    acoustic: file of a trained voice (tts.safetensors).
    """

    def __init__(self, files: Sequence[str], acoustic: str | None = None) -> None:
        self.files = [(Path(file), "") for file in files]
        if acoustic is not None:
            self.files.append((Path(acoustic), "tts."))  # prefix of the voice's weights, which its file lacks

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
            network: Any = pl_module.network  # torch's types allow a tensor here, too
            if prefix:
                self._reorder(state, network.state_dict(), pl_module.hparams["units"], file.with_suffix(".json"))
            left = load_network(network, state)
            taken = len(network.state_dict()) - len(left)
            if taken == 0:
                raise InputError(f"`files` must fit the network, but no tensor of '{file}' does. Check the sizes.")
            rank_zero_info(f"{file}: {taken} tensors loaded")

    def _reorder(self, state: dict[str, Tensor], own: dict[str, Tensor], units: list[str], listed: Path) -> None:
        """Put the phones' embeddings in this model's order. A phone unknown to the voice keeps its initial row.

        state: the voice's weights, changed in place. own: this model's weights. units: this model's
            phones. listed: the voice's tts.json.
        """
        earlier = json.loads(listed.read_text(encoding="utf-8"))["units"]
        rows = own["tts.units.weight"].clone()
        for index, unit in enumerate(units):
            if unit in earlier:
                rows[index] = state["tts.units.weight"][earlier.index(unit)]
        state["tts.units.weight"] = rows
