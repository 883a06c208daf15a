"""Training of a small Whisper to predict the next token, letters (CTC on the encoder), and tokens further ahead.

Medusa heads are trained later on the frozen model, and predict tokens further ahead from its decoder states. If the
model itself learns to do this, its states contain more of the coming sound (multi-token prediction: Gloeckle et al.
2024; Medusa: Cai et al. 2024). `init_local_attention` makes the encoder's initial attention local, and
`protect_positions` keeps it so in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import WhisperConfig, WhisperForConditionalGeneration

from mmdec.checks.files import one_line
from mmdec.hub.medusa import load_heads
from mmdec.hub.whisper import HEADS, read_model
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.training.checkpoints import keep_options
from mmdec.training.optim import MuonAdamW, Schedule, scheduled, seed_step, token_weight
from mmdec.training.whisper.window_data import END, IGNORED, LETTERS, START, Batch
from mmdec.types import InputError

FIRST_SCALE = 1.3  # factor on initial query and key weights, first encoder layer: attention spans about five positions
LATER_SCALE = 3.0  # factor on the initial weights of queries and keys in all encoder layers but the first


@torch.no_grad()
def protect_positions(model: WhisperForConditionalGeneration) -> None:
    """Keep some channels of the encoder's states free of everything but position embeddings. Call this function after
    each training step.

    `init_local_attention` makes attention read these channels. Without this function, layer outputs grow to ten times
    the position embeddings and hide them: in experiments, later layers lost local attention after a few hundred steps.
    So layers write nothing to these channels. The layers' outputs in all other channels have zero mean, because layer
    norm would otherwise change these channels, too. The layer norms of later layers add no bias to these channels.
    """
    encoder: Any = model.model.encoder  # typed as `Any`, because type checkers take a module's attributes for tensors
    width, half = model.config.d_model, model.config.d_model // 2
    pairs = min(width // model.config.encoder_attention_heads // 2, half)
    kept = torch.zeros(width, dtype=torch.bool, device=encoder.embed_positions.weight.device)
    kept[:pairs] = kept[half : half + pairs] = True
    encoder.conv2.weight[kept] = 0
    encoder.conv2.bias[kept] = 0
    for depth, layer in enumerate(encoder.layers):
        if depth:
            layer.self_attn_layer_norm.bias[kept] = 0
        for output in (layer.self_attn.out_proj, layer.fc2):
            for values in (output.weight, output.bias):
                values[~kept] -= values[~kept].mean(0)
                values[kept] = 0


@torch.no_grad()
def init_local_attention(model: WhisperForConditionalGeneration) -> None:
    """Let each head of a new encoder attend to positions at a fixed small distance, as a convolution does.

    Position embeddings are sinusoids. If query and key read the same frequencies, and one of them is rotated, they
    match at positions that differ by this rotation. Training then adds attention to content. With plain random weights,
    most of the training time would be needed to learn local attention.
    """
    encoder: Any = model.model.encoder  # typed as `Any`, because type checkers take a module's attributes for tensors
    width, heads = model.config.d_model, model.config.encoder_attention_heads
    half, size = width // 2, width // heads
    pairs = min(size // 2, half)
    speeds = torch.exp(-math.log(10000) / (half - 1) * torch.arange(pairs))  # Whisper's highest frequencies
    for depth, layer in enumerate(encoder.layers):
        query: Tensor = layer.self_attn.q_proj.weight
        key: Tensor = layer.self_attn.k_proj.weight
        scale = LATER_SCALE if depth else FIRST_SCALE
        for head in range(heads):
            turn = speeds * (head - heads // 2) * 2 * (depth + 1)
            for pair in range(pairs):
                sine, cosine = head * size + 2 * pair, head * size + 2 * pair + 1
                for weight, angle in ((query, turn[pair]), (key, torch.zeros(()))):
                    weight[sine] *= 0.3
                    weight[cosine] *= 0.3
                    weight[sine, pair] += scale * angle.cos()
                    weight[sine, half + pair] += scale * angle.sin()
                    weight[cosine, pair] -= scale * angle.sin()
                    weight[cosine, half + pair] += scale * angle.cos()


STATE_SECONDS = 0.02  # seconds of sound between two encoder states
PARTS = (100, 250)  # in steps that encode windows in parts, a part has 100 to 249 encoder states


@dataclass(frozen=True)
class Shape:
    """The sizes of the network."""

    width: int = 160  # channels of the encoder and decoder states
    attention_heads: int = 5
    encoder_layers: int = 3
    encoder_ffn: int = 640  # channels of the encoder's feed-forward layers
    decoder_layers: int = 8
    decoder_ffn: int = 320  # channels of the decoder's feed-forward layers
    mels: int = 80  # mel bands
    source_positions: int = 1500  # the most encoder states of a window, 20 ms each
    target_positions: int = 448  # the most decoder tokens, prompt included
    dropout: float = 0.0


@dataclass(frozen=True)
class WhisperOptions:
    """Options of `WhisperModule` that a recipe (YAML file) sets.

    parted: share of the steps in which the encoder reads each window in parts of a few seconds, which takes a fifth
        less time. In the other steps the encoder learns to read whole windows.
    ahead: number of heads that predict later tokens; head k predicts the k-th token after the next one. `ahead_drawn`
        of them are trained in each step.
    guided: (layer, head) pairs of cross-attention that learn to follow the sound, to within `guide_seconds`.
    ctc_weight, ahead_weight, guide_weight: weights of the losses.
    warmup, decay_from, decay_steps: in training steps. The learning rate rises for `warmup` steps, and falls linearly
        to zero from step `decay_from` on, within `decay_steps`.
    start: folder of an exported model, with its heads, to begin from. The CTC layer is new, because it is not exported.
    """

    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: int = 400
    decay_from: int | None = None
    decay_steps: int = 1000
    ctc_weight: float = 0.3
    ahead: int = 8
    ahead_weight: float = 0.2
    ahead_drawn: int = 4
    guided: Sequence[tuple[int, int]] = ((2, 0), (2, 1), (4, 0), (4, 1))
    guide_weight: float = 0.3
    guide_seconds: float = 0.4
    parted: float = 0.0
    start: str | None = None
    seed: int = 0


class WhisperModule(LightningModule):
    """Trains a small Whisper with the loss L_next + ctc_weight L_CTC + ahead_weight L_ahead + guide_weight L_guide.

    L_next is the cross-entropy of the next token. L_CTC is the CTC loss of the encoder, by letters. L_ahead is the
    cross-entropy of later tokens, averaged over heads k with weights 0.8^k. L_guide trains some cross-attention heads
    to attend near the time when the next token is spoken. So the decoder learns early where to look, and word
    timestamps can be read from these heads. All randomness of a step follows from (seed, epoch, step).

    units: the vocabulary as tokens ordered by id. options: fields of `WhisperOptions`.
    """

    def __init__(self, units: list[str], shape: Shape | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["shape"])
        self.options = WhisperOptions(**options)
        self.shape = shape or Shape()
        keep_options(self, self.options)
        self.hparams["shape"] = asdict(self.shape)
        layers, attention_heads = self.shape.decoder_layers, self.shape.attention_heads
        if any(not (0 <= layer < layers and 0 <= head < attention_heads) for layer, head in self.options.guided):
            raise InputError(
                f"`guided` must name (layer, head) pairs of {layers} decoder layers with {attention_heads} heads, but "
                f"is {self.options.guided}. Leave others out."
            )
        torch.manual_seed(self.options.seed)
        self.model = WhisperForConditionalGeneration(configuration(self.shape, units))
        self.model.set_attn_implementation("eager")  # a third faster on a CPU than fused attention
        init_local_attention(self.model)
        protect_positions(self.model)
        self.letters = nn.Linear(self.shape.width, 1 + len(LETTERS))
        sizes = {"heads": self.options.ahead, "mels": self.shape.mels, "base": "the model beside them"}
        self.heads = MedusaHeads(MedusaConfig(self.shape.width, len(units), **sizes))
        if self.options.start is not None:
            self.begin_from(Path(self.options.start))
        self.rate = Schedule("trapezoid", self.options.warmup, self.options.decay_from, self.options.decay_steps)

    def begin_from(self, folder: Path) -> None:
        """Load the weights of the exported model in `folder`, and of its heads. Raises InputError if their sizes
        differ."""
        model = read_model(folder)
        heads = load_heads(folder / HEADS, model).heads
        for name, own, theirs in (("model", self.model, model), ("heads", self.heads, heads)):
            try:
                own.load_state_dict(theirs.state_dict())
            except RuntimeError as error:
                raise InputError(f"`start` must fit, but the {name} of '{folder}' do not ({one_line(error)})") from None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        seed_step(self.options.seed, self.current_epoch, batch_idx)

    def on_train_batch_end(self, outputs: object, batch: Batch, batch_idx: int) -> None:
        protect_positions(self.model)

    def encode(self, features: Tensor, part: int = 0) -> Tensor:
        """Run the encoder on features (B, mels, F), F at most 3000. Returns states (B, F / 2, H). (transformers' own
        encoder refuses windows shorter than 30 s.)

        part: if not 0, windows are cut into parts of `part` states, and attention stays within a part.
        """
        encoder = self.model.model.encoder
        x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(features)))).transpose(1, 2)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        rows, columns, width = x.shape
        if 0 < part < columns:
            x = F.pad(x, (0, 0, 0, -columns % part)).reshape(-1, part, width)
        for layer in encoder.layers:
            x = layer(x, None)
        return encoder.layer_norm(x).reshape(rows, -1, width)[:, :columns]

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Compute a batch's losses and accuracies by name. "loss" is the weighted sum of the losses; "right" is the
        accuracy of the next token, from 0 to 1."""
        part = 0
        if self.training and torch.rand(()) < self.options.parted:
            part = int(torch.randint(*PARTS, ()))
        states = self.encode(batch.features, part)
        with watched(self.model, {layer for layer, _ in self.options.guided}) as seen:
            hidden = self.model.model.decoder(
                input_ids=batch.tokens, encoder_hidden_states=states, use_cache=False
            ).last_hidden_state
        logits = self.model.proj_out(hidden)
        asked = batch.labels != IGNORED
        own = F.cross_entropy(logits[asked].float(), batch.labels[asked])
        parts = {
            "next": own * token_weight(asked.sum()),
            "right": (logits.argmax(-1) == batch.labels)[asked].float().mean(),
            "ctc": self.letter_loss(states, batch),
            "guide": self.guide_loss(seen, states, batch.times),
            **self.ahead_losses(hidden, batch.labels),
        }
        parts["loss"] = parts["next"] + self.options.ctc_weight * parts["ctc"]
        parts["loss"] = parts["loss"] + self.options.ahead_weight * parts["ahead"]
        parts["loss"] = parts["loss"] + self.options.guide_weight * parts["guide"]
        return parts

    def guide_loss(self, inputs: dict[int, Tensor], states: Tensor, times: Tensor) -> Tensor:
        """Compute L_guide: -log of the attention that the guided heads pay to the sound near each label's time. It is
        averaged over heads and tokens.

        inputs: layer -> inputs (B, L, H) of its cross-attention's queries. states: (B, S, H) encoder states.
        times: (B, L) when each label is spoken, in seconds; negative where unknown.
        """
        timed = times >= 0
        weight = token_weight(timed.sum())
        if not bool(timed.any()):
            return states.sum() * 0
        seconds = torch.arange(states.shape[1], device=states.device) * STATE_SECONDS
        near = (seconds - times[..., None]).abs() <= self.options.guide_seconds  # (B, L, S): tokens, encoder states
        total = states.sum() * 0
        for layer, head in self.options.guided:
            attention: Any = self.model.model.decoder.layers[layer].encoder_attn
            size = self.shape.width // self.shape.attention_heads
            own = slice(head * size, (head + 1) * size)
            queries = F.linear(inputs[layer], attention.q_proj.weight[own], attention.q_proj.bias[own])
            keys = F.linear(states, attention.k_proj.weight[own])
            scores = (queries @ keys.transpose(1, 2)).float() * size**-0.5  # shape (B, L, S)
            inside = scores.masked_fill(~near, -1e4).logsumexp(-1) - scores.logsumexp(-1)
            total = total - inside[timed].mean()
        return total / max(len(self.options.guided), 1) * weight

    def letter_loss(self, states: Tensor, batch: Batch) -> Tensor:
        """Compute the CTC loss per letter, over the windows whose text is known. states: (B, S, H) encoder states."""
        spelled = batch.letter_lengths > 0
        weight = token_weight(spelled.sum())
        if not bool(spelled.any()):
            return states.sum() * 0
        scores = self.letters(states[spelled]).float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full((int(spelled.sum()),), states.shape[1], device=states.device)
        texts, sizes = batch.letters[spelled], batch.letter_lengths[spelled]
        return F.ctc_loss(scores, texts, lengths, sizes, zero_infinity=True) * weight

    def ahead_losses(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute the loss of later tokens, "ahead", and in validation also each head's accuracy. Head k (from 1) at
        position t predicts the label of position t + k. hidden: (B, L, H), the decoder's states. labels: (B, L)."""
        count = len(self.heads.heads)
        chosen = range(count)
        if self.training:
            chosen = sorted(torch.randperm(count)[: self.options.ahead_drawn].tolist())
        total = hidden.sum() * 0
        weights, right = 0.0, {}
        for index in chosen:
            later = labels[:, index + 1 :]
            asked = (later != IGNORED) & (labels[:, : later.shape[1]] != IGNORED)
            weight, tokens = 0.8 ** (index + 1), token_weight(asked.sum())
            weights += weight
            if not bool(asked.any()):
                continue
            states = self.heads.heads[index](hidden[:, : later.shape[1]][asked])
            logits = self.model.proj_out(states).float()
            total = total + weight * tokens * F.cross_entropy(logits, later[asked])
            right[f"head{index + 1}"] = (logits.argmax(-1) == later[asked]).float().mean()
        return {"ahead": total / max(weights, 1e-9), **({} if self.training else right)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        parts = self.losses(batch)
        for name, value in parts.items():
            loss = name != "right"
            self.log(f"train/{name}", value.detach(), batch_size=len(batch.rows), sync_dist=loss)
        self.log("step", float(self.global_step))
        return parts["loss"]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        parts = self.losses(batch)
        self.log_dict({f"dev/{name}": v for name, v in parts.items()}, batch_size=len(batch.rows), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        def inner(name: str, _: Tensor) -> bool:
            return not any(outer in name for outer in ("embed", "proj_out", "letters"))

        optimizer = MuonAdamW.of(self.named_parameters(), inner, self.options.lr, self.options.weight_decay)
        return scheduled(optimizer, lambda step: self.rate(step))


@contextmanager
def watched(model: WhisperForConditionalGeneration, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Within the `with` block, record the inputs (B, L, H) of the cross-attention in some decoder layers. Yields a
    dict: layer index -> its inputs in the last forward pass."""
    decoder: Any = model.model.decoder  # typed as `Any`, because type checkers take a module's attributes for tensors
    inputs: dict[int, Tensor] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any, layer: int) -> None:
        inputs[layer] = args[0] if args else kwargs["hidden_states"]

    with ExitStack() as hooks:
        for layer in layers:
            hook = partial(keep, layer=layer)
            handle = decoder.layers[layer].encoder_attn.register_forward_pre_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield inputs


def configuration(shape: Shape, units: list[str]) -> WhisperConfig:
    """Return the configuration of a Whisper with these sizes. units: its vocabulary as tokens ordered by id."""
    end = units.index(END)
    return WhisperConfig(
        vocab_size=len(units),
        num_mel_bins=shape.mels,
        d_model=shape.width,
        encoder_layers=shape.encoder_layers,
        encoder_attention_heads=shape.attention_heads,
        encoder_ffn_dim=shape.encoder_ffn,
        decoder_layers=shape.decoder_layers,
        decoder_attention_heads=shape.attention_heads,
        decoder_ffn_dim=shape.decoder_ffn,
        max_source_positions=shape.source_positions,
        max_target_positions=shape.target_positions,
        dropout=shape.dropout,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=units.index(START),
    )
