"""Training of Medusa heads on a frozen Whisper (Segal-Feldman et al. 2024, arXiv 2409.15869; Cai et al. 2024).

The Whisper is neither trained nor saved. Head k = 1 ... K reads the hidden state from which the model predicts token t
+ 1. It learns token t + 1 + k of the text that the model itself decodes greedily, because drafts are verified against
that text. (The paper's heads learn from transcripts.)

Validation simulates decoding to measure tokens per round (`networks/training/simulation.py`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.optim import Optimizer
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdec.core.tree_shape import MAX_RANKS
from mmdec.drafters.medusa.checkpoint import load_heads, save_heads
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.medusa.network import HeadKind, MedusaConfig, MedusaHeads
from mmdec.drafters.medusa.training.data import (
    LANGUAGE_PLACEHOLDER,
    HeadBatch,
    HeadData,
    decode_greedily,
    decoding_fingerprint,
)
from mmdec.drafters.networks.training.simulation import measure, spread
from mmdec.errors import InputError
from mmdec.hub.publish import atomic_folder
from mmdec.training.module import DrafterModule
from mmdec.training.optim import groups, token_weight
from mmdec.training.stores import EncodedWindows, HiddenStateStore, TokenStore


def first_heads(
    model: WhisperForConditionalGeneration, base: str, kind: HeadKind, count: int, start: str | None
) -> MedusaHeads:
    """Return the heads that training begins with.

    Args:
        base: Name or folder of the Whisper.
        count: Number of heads.
        start: Folder of saved heads; they are extended or cut to `count`. None: new heads.

    Raises:
        InputError: If `start` holds heads of another `kind`.
    """
    shape = model.config
    block = kind == "block"
    config = MedusaConfig(
        hidden_size=shape.d_model,
        vocab_size=shape.vocab_size,
        kind=kind,
        heads=count,
        attention_heads=shape.decoder_attention_heads if block else 0,
        ffn=shape.decoder_ffn_dim if block else 0,
        mels=shape.num_mel_bins,
        base=Path(base).name if Path(base).is_dir() else base,
    )
    heads = MedusaHeads(config)
    if start is None:
        if heads.block is not None:  # the block has the parameter names of Whisper's decoder layer
            heads.block.load_state_dict(model.model.decoder.layers[-1].state_dict())
        return heads.float()
    earlier = load_heads(start, model).heads
    if earlier.config.kind != kind:
        raise InputError(f"`start` must hold {kind} heads, but '{start}' holds {earlier.config.kind} ones. Set `kind`.")
    matching = {name: value for name, value in earlier.state_dict().items() if name in heads.state_dict()}
    heads.load_state_dict(matching, strict=False)
    return heads.float()


MAX_LOGITS = 1 << 25  # the most logits (positions x vocabulary) in memory at a time


class _FrozenOutput(torch.autograd.Function):
    """Computes the loss and also its gradient in the forward pass, for some of the N states at a time.

    So the logits of all states never have to be in memory together.
    """

    @staticmethod
    def forward(  # type: ignore[override] # torch declares it with any arguments
        ctx: Any, states: Tensor, output: Tensor, targets: Tensor, teacher: Tensor | None, weight: float, cells: int
    ) -> tuple[Tensor, Tensor]:
        needs_gradient = states.requires_grad
        gradient = torch.empty_like(states) if needs_gradient else None
        ranks = torch.empty_like(targets)
        total = torch.zeros((), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
        rows = max(1, cells // output.shape[0])
        for begin in range(0, len(states), rows):
            part = slice(begin, begin + rows)
            target = targets[part, None]
            logits = linear(states[part].to(output.dtype), output).to(total.dtype)
            score = logits.gather(1, target)
            ranks[part] = (logits > score).sum(1)
            logs = logits.log_softmax(1)
            total -= logs.gather(1, target).sum()
            slope = logs.exp()
            if teacher is not None:
                guide = linear(teacher[part].to(output.dtype), output).to(total.dtype).log_softmax(1)
                likely = guide.exp()
                total += weight * (likely * (guide - logs)).sum()
                slope = slope * (1 + weight) - weight * likely
            if gradient is not None:
                slope.scatter_add_(1, target, -torch.ones_like(score))
                gradient[part] = (slope.to(output.dtype) @ output).to(gradient.dtype)
        count = max(len(states), 1)
        if gradient is not None:
            ctx.save_for_backward(gradient.div_(count))
        ctx.mark_non_differentiable(ranks)
        return total / count, ranks

    @staticmethod
    def backward(ctx: Any, loss: Tensor, _: Tensor) -> Any:  # type: ignore[override] # declared with any
        (gradient,) = ctx.saved_tensors
        return (gradient * loss).to(gradient.dtype), None, None, None, None, None


def head_loss(
    states: Tensor,
    output: Tensor,
    targets: Tensor,
    teacher: Tensor | None = None,
    teacher_weight: float = 0.0,
    cells: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Compute a head's cross-entropy, and the rank of each target token.

    Args:
        states: (N, H) the head's outputs.
        output: (V, H) the model's output matrix.
        targets: (N,) int64 token ids.
        teacher: (N, H) the model's states from which it predicts the same tokens. `teacher_weight` x KL(model || head)
            is then added to the loss, as in arXiv 2409.15869. No gradient reaches the matrix or the teacher.
        cells: The most logits in memory at a time.

    Returns:
        The mean loss, and ranks (N,): 0 where a target is the likeliest token.
    """
    if not teacher_weight:
        teacher = None
    loss, ranks = _FrozenOutput.apply(states, output.detach(), targets, teacher, teacher_weight, cells)
    return loss, ranks


TOP_TOKENS = 5  # validation logs how often the true token is among a head's five likeliest tokens


@dataclass(frozen=True)
class TextPositions:
    """The texts of a batch, N tokens in all, and the P positions in them from which heads predict."""

    hidden: Tensor  # (N, H) the decoder state from which the model predicts each token
    indices: Tensor  # (P,) index in `hidden` of each position
    targets: Tensor  # (P, K) int64, the token id that each head learns; -1 after the text's end
    lengths: list[int]  # number of positions of each text
    # for block heads: decoder states (B, T, H), encoder states (B, S, H), index of each `hidden` in the B * T states
    whole: tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class MedusaOptions:
    """Options of `MedusaModule` that a recipe (YAML file) sets.

    Args:
        kind: "linear" or "block" (heads after an additional decoder layer, which begins as a copy of the model's last
            decoder layer).
        heads: Number of heads.
        start: Folder of saved heads to begin from; additional heads begin as identity mappings.
        labels: The text to learn: "own": what the model itself decodes greedily; "truth": the transcripts.
        weights: Loss weights of heads k = 1 ... K: "medusa": 0.8^k; "mean": all equal, as in arXiv 2409.15869.
        kl: Weight of KL(model || head), the divergence from the model's own distribution of the same token.
        max_tokens: The most tokens of a text that the model decodes.
        draft_nodes: Number of tokens that the heads draft in each round while the model decodes labels.
        keep_states: Store states on disk, so that windows that repeat are not encoded again: the decoder's for linear
            heads, 2 H bytes per token; the encoder's for a block, 2 S H bytes per window.
        vocabulary: 0, or the number of the most frequent tokens among the labels so far that the training loss compares
            a target with, in addition to the targets of the batch. The cost of a step on a processor is nearly
            proportional to it.
        tree_nodes: Number of nodes of the draft tree in validation. The heads with the most tokens per round with this
            tree are saved.
        base_dtype: Dtype of the frozen Whisper.
        warmup, decay_from, decay_steps: Steps of the learning rate: it rises for `warmup` steps, and falls to zero from
            step `decay_from` on, within `decay_steps`.
    """

    kind: HeadKind = "linear"
    heads: int = 10
    start: str | None = None
    labels: Literal["own", "truth"] = "own"
    weights: Literal["medusa", "mean"] = "medusa"
    kl: float = 0.0
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    warmup: int = 50
    decay_from: int | None = None
    decay_steps: int = 1000
    max_tokens: int = 440
    draft_nodes: int = 8
    tree_nodes: int = 16
    keep_states: bool = False
    vocabulary: int = 0
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class MedusaModule(DrafterModule):
    """Trains heads of a frozen Whisper, the data module's `base`. L = sum_k w_k (CE_k + kl KL_k) / sum_k w_k.

    The best heads (the most tokens per round with trees) are saved in `heads/` of the trainer's root folder, with the
    accuracies that set the shape of draft trees.

    Args:
        units: Ignored; the command line passes it to every model.
        options: Fields of `MedusaOptions`.
    """

    options: MedusaOptions
    decides = "tree"

    def __init__(self, units: list[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["units"])
        self.use_options(MedusaOptions(**options))
        self.count = self.options.heads
        self.weights = [0.8**k if self.options.weights == "medusa" else 1.0 for k in range(1, self.count + 1)]
        # (K, R); [k][r] is the share of positions, from 0 to 1, at which head k's candidate of rank r is right
        self.probabilities: list[list[float]] | None = None  # None before they are measured

    @property
    def base(self) -> WhisperForConditionalGeneration:
        return self.frozen_base[0]

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined] # not declared by Lightning
        if not isinstance(data, HeadData):
            raise InputError(f"`data` must be HeadData for heads, but is {type(data).__name__}. Change the recipe.")
        model = data.model()
        self.base_fingerprint = decoding_fingerprint(model)
        self.heads = first_heads(model, data.base, self.options.kind, self.count, self.options.start)
        dtype: torch.dtype = getattr(torch, self.options.base_dtype)
        device = self.trainer.strategy.root_device
        # Inside a tuple, the model is not a submodule: Lightning does not save, train, move or average it.
        model = model.to(device=device, dtype=dtype)  # type: ignore[call-arg] # pyright does not bind a decorated `to`
        self.frozen_base = (model.requires_grad_(False).eval(),)
        options = f"{self.base_fingerprint}-{self.options.base_dtype}-{self.options.max_tokens}"
        self.labels = TokenStore(data.cache_dir / f"labels-{options}", self.global_rank)
        self.counts: Counter[int] = Counter(token for text in self.labels.tokens.values() for token in text)
        self.states: HiddenStateStore | None = None
        self.encoded: EncodedWindows | None = None
        if self.options.keep_states and self.options.kind == "block":
            folder = data.cache_dir / f"encoded-{self.options.labels}-{options}"
            self.encoded = data.stored = EncodedWindows(folder, model.config.d_model, self.global_rank)
        elif self.options.keep_states:
            folder = data.cache_dir / f"states-{self.options.labels}-{options}"
            self.states = data.stored = HiddenStateStore(folder, model.config.d_model, self.global_rank)

    def text_positions(self, batch: HeadBatch) -> TextPositions:
        """Return the texts of a batch with the model's decoder states, which are stored or computed now."""
        whole = None
        if batch.features is None and self.states is not None:
            stored_states = [self.states.get(name) for name in batch.names]
            texts, hidden = (
                [text for text, _ in stored_states],
                torch.cat([states for _, states in stored_states]).to(self.device),
            )
        else:
            texts, hidden, whole = self.run_model(batch)
        indices, targets, lengths, begin = [], [], [], 0
        for text in texts:
            count = max(len(text) - 1, 0)
            indices.append(torch.arange(begin, begin + count))
            later = torch.tensor(text[1:] + [-1] * self.count)
            targets.append(later.unfold(0, self.count, 1)[:count])
            lengths.append(count)
            begin += len(text)
        return TextPositions(
            hidden, torch.cat(indices).to(self.device), torch.cat(targets).to(self.device), lengths, whole
        )

    @torch.no_grad()
    def run_model(self, batch: HeadBatch) -> tuple[list[list[int]], Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Run the encoder, decode the texts that are not stored yet, and run the decoder over all texts.

        Returns:
            The texts' token ids, their decoder states (N, H), and `TextPositions.whole`.
        """
        model = self.base
        with torch.autocast(self.device.type, enabled=False):
            if batch.features is None and self.encoded is not None:
                stored = [self.encoded.get(name) for name in batch.names]
                prompts, texts = [prompt for prompt, _, _ in stored], [text for _, text, _ in stored]
                states = torch.stack([states for _, _, states in stored]).to(self.device, model.dtype)
            else:
                assert batch.features is not None
                states = model.model.encoder(batch.features.to(model.dtype)).last_hidden_state
                if self.encoded is not None:
                    states = states.half().to(model.dtype)  # as stored states are rounded
                prompts = self._prompts(states, batch.prompts)
                texts = batch.truth if self.options.labels == "truth" else self._own(states, prompts, batch)
                if self.encoded is not None:
                    self.encoded.add(batch.names, prompts, texts, states)
            reach = model.config.max_target_positions
            texts = [text[: max(reach + 1 - len(prompt), 0)] for text, prompt in zip(texts, prompts, strict=True)]
            read = [[*prompt, *text[:-1]][:reach] for prompt, text in zip(prompts, texts, strict=True)]
            ids = torch.full((len(read), max(map(len, read))), int(model.config.pad_token_id or 0))
            for row, tokens in enumerate(read):
                ids[row, : len(tokens)] = torch.tensor(tokens)
            ids = ids.to(self.device)
            hidden = model.model.decoder(input_ids=ids, encoder_hidden_states=states, use_cache=False).last_hidden_state
        begins = [row * ids.shape[1] + len(prompt) - 1 for row, prompt in enumerate(prompts)]
        columns = [torch.arange(begin, begin + len(text)) for begin, text in zip(begins, texts, strict=True)]
        where = torch.cat(columns).to(self.device)
        features = hidden.flatten(0, 1)[where].float()
        if self.states is not None:
            features = features.half().float()  # round the features to half precision, as stored states are
            parts = features.split([len(text) for text in texts])
            fresh = zip(batch.names, texts, parts, strict=True)
            self.states.add({name: (text, part) for name, text, part in fresh if name not in self.states})
        return texts, features, (hidden.float(), states.float(), where)

    def losses(self, positions: TextPositions) -> tuple[list[Tensor], Tensor]:
        """Return each head's loss, and the ranks (P, K) of the target tokens.

        A rank is at most MAX_RANKS, and MAX_RANKS after the text's end.
        """
        read, output = positions.hidden, self.base.proj_out.weight
        if self.heads.block is not None:
            assert positions.whole is not None
            hidden, states, where = positions.whole
            read = self.heads.head_inputs(hidden, states).flatten(0, 1)[where]
        ranks = torch.full_like(positions.targets, MAX_RANKS)
        targets = positions.targets
        if self.training and self.options.vocabulary:
            output, targets = self._frequent(output, targets)
        losses = []
        weights = token_weight((positions.targets >= 0).sum(0))
        for index, head in enumerate(self.heads.heads):
            rows = (positions.targets[:, index] >= 0).nonzero()[:, 0]
            indices = positions.indices[rows]
            # The head predicts a token that the model itself predicts `index` + 1 positions later.
            teacher = positions.hidden[indices + index + 1] if self.options.kl else None
            loss, rank = head_loss(head(read[indices]), output, targets[rows, index], teacher, self.options.kl)
            ranks[rows, index] = rank.clamp(max=MAX_RANKS)
            losses.append(loss * weights[index])
        return losses, ranks

    def _frequent(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Restrict the output matrix (V, H) to the frequent tokens and the targets (P, K).

        Returns:
            Its rows (v, H), and the targets as indices of these rows; -1 stays.
        """
        frequent = [token for token, _ in self.counts.most_common(self.options.vocabulary)]
        ids = torch.cat([targets[targets >= 0].cpu(), torch.tensor(frequent, dtype=torch.long)]).unique()
        ids = ids.to(output.device)
        return output[ids], torch.where(targets >= 0, torch.searchsorted(ids, targets.clamp(min=0)), targets)

    def weighted_loss(self, losses: Sequence[Tensor]) -> Tensor:
        return sum((w * loss for w, loss in zip(self.weights, losses, strict=True)), losses[0] * 0) / sum(self.weights)

    def training_step(self, batch: HeadBatch, batch_idx: int) -> Tensor:
        positions = self.text_positions(batch)
        losses, ranks = self.losses(positions)
        loss = self.weighted_loss(losses)
        counts = (positions.targets >= 0).sum(0).clamp(min=1)
        right = ((ranks == 0).sum(0) / counts).tolist()
        self.log("train/loss", loss.detach(), batch_size=len(positions.lengths), prog_bar=True, sync_dist=True)
        self.log_dict({f"train/head{k}": value for k, value in enumerate(right, 1)}, batch_size=len(positions.lengths))
        return loss

    def validation_step(self, batch: HeadBatch, batch_idx: int) -> None:
        positions = self.text_positions(batch)
        losses, ranks = self.losses(positions)
        self.add_validation(ranks.cpu().split(positions.lengths), float(self.weighted_loss(losses)))

    def score(self, texts: list[Tensor]) -> dict[str, float]:
        chain, tree, self.probabilities = measure(texts, self.count, self.options.tree_nodes)
        scores = {"chain": chain, "tree": tree}
        for head in range(self.count):
            first, top = spread(texts, head, (1, TOP_TOKENS))
            scores |= {f"head{head + 1}": first, f"head{head + 1}_top{TOP_TOKENS}": top}
        return scores

    def save_drafter(self, scores: dict[str, float]) -> Path:
        """Save the heads in half precision in the folder `heads/` below the trainer's root folder."""
        folder = Path(self.trainer.default_root_dir) / "heads"
        if self.trainer.is_global_zero:
            with atomic_folder(folder) as fresh:
                ranks = self.probabilities if scores else None
                save_heads(fresh, copy.deepcopy(self.heads).half(), ranks=ranks, place=folder)
                self.write_training(fresh, scores)
        return folder

    def optimizer(self) -> Optimizer:
        parameters = groups(self.heads.parameters(), self.options.weight_decay)
        first, second = self.options.betas
        return torch.optim.AdamW(parameters, lr=self.options.lr, betas=(first, second))

    def _own(self, states: Tensor, prompts: list[list[int]], batch: HeadBatch) -> list[list[int]]:
        missing = [row for row, name in enumerate(batch.names) if self.labels.get(name) is None]
        if missing:
            nodes, missing_prompts = self.options.draft_nodes, [prompts[row] for row in missing]
            # The heads in training may have another dtype than the model, so a converted copy drafts.
            drafter = (
                MedusaDrafter(copy.deepcopy(self.heads).to(self.base.dtype), self.base.proj_out) if nodes else None
            )
            timed = [batch.timed[row] for row in missing]
            fresh = decode_greedily(
                self.base, states[missing], missing_prompts, timed, self.options.max_tokens, drafter, nodes
            )
            self.labels.add({batch.names[row]: text for row, text in zip(missing, fresh, strict=True)})
            self.counts.update(token for text in fresh for token in text)
        return [self.labels.tokens[name] for name in batch.names]

    def _prompts(self, states: Tensor, prompts: list[list[int]]) -> list[list[int]]:
        if not any(LANGUAGE_PLACEHOLDER in prompt for prompt in prompts):
            return prompts
        encoded = BaseModelOutput(last_hidden_state=states)
        languages: list[int] = self.base.detect_language(encoder_outputs=encoded).tolist()
        return [
            [language if token == LANGUAGE_PLACEHOLDER else token for token in prompt]
            for language, prompt in zip(languages, prompts, strict=True)
        ]
