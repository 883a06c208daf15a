"""Training of Medusa heads on a frozen Whisper (Segal-Feldman et al. 2024, arXiv 2409.15869; Cai et al. 2024).

The model is as it was: its weights are not trained, not saved, and no gradient passes through it. Head k = 1 ... K
learns, from the state whose own next token is t + 1, the token t + 1 + k of the model's own greedy text, which is what
its drafts are verified against; the paper's variant learns from transcripts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdec.drafters.medusa import WIDTH
from mmdec.hub.medusa import save_heads
from mmdec.hub.publish import whole_folder, write_provenance
from mmdec.nn.medusa import Kind
from mmdec.training.lr_schedule import Schedule
from mmdec.training.medusa.data import DETECT, HeadBatch, HeadData
from mmdec.training.medusa.init import first_heads, head_weights
from mmdec.training.medusa.loss import head_loss
from mmdec.training.medusa.self_labels import fingerprint, own_text
from mmdec.training.medusa.simulate import gather_ranks, measure, spread
from mmdec.training.optim import groups, scheduled
from mmdec.training.options import keep_options
from mmdec.training.stores import StateStore, TokenStore
from mmdec.types import InputError

TOP = 5


@dataclass(frozen=True)
class TextPositions:
    """The texts of a batch, N tokens, and the P positions among them from which heads predict."""

    hidden: Tensor  # (N, H) of the model: the states that each token was predicted from
    at: Tensor  # (P,) into hidden
    targets: Tensor  # (P, K) each head's target, -1 beyond the text's end
    lengths: list[int]  # positions of each row
    whole: tuple[Tensor, Tensor, Tensor] | None  # of a block: (B, T, H), the encoder's (B, S, H), hidden's indices


@dataclass(frozen=True)
class MedusaOptions:
    """What a recipe sets.

    kind, heads: which heads (a block's layer begins as the decoder's last). start: a folder of saved heads to begin
    from; further ones begin as identities. labels: the model's "own" greedy text, decoded once, or the "truth".
    weights: "medusa" (0.8^k), "mean" (the Whisper paper's), or a number for each head. kl: weight of the divergence
    from the model's own next distributions. max_tokens: of an own text. draft_nodes: drafted by the heads while labels
    are decoded. keep_states: keep the decoder's states on disk, 2 H bytes a token: windows that come again (the data's
    `repeat_after`, and all of the development split) are then not encoded again. tree_nodes: of the tree whose tokens
    per round decide which heads are the best.
    """

    kind: Kind = "linear"
    heads: int = 10
    start: str | None = None
    labels: Literal["own", "truth"] = "own"
    weights: Literal["medusa", "mean"] | list[float] = "medusa"
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
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        if self.labels not in ("own", "truth"):
            raise InputError(f"`labels` must be own or truth, but is {self.labels!r}. Choose one.")
        if self.keep_states and self.kind == "block":
            raise InputError("`keep_states` must be false for a block, which reads the encoder's states, but is true.")


class MedusaModule(LightningModule):
    """L = sum_k w_k (CE_k + kl KL_k) / sum_k w_k over the heads of a frozen Whisper, which is the data's `base`.

    The best heads by tokens per round are kept in `heads/` of the trainer's root, with the accuracies that trees are
    shaped by. units: ignored; the command line passes it to every model. options: those of `MedusaOptions`.
    """

    def __init__(self, units: list[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["units"])
        self.options = MedusaOptions(**options)
        keep_options(self, self.options)
        self.count = self.options.heads
        self.weights = head_weights(self.options.weights, self.count)
        self.rate = Schedule("trapezoid", self.options.warmup, self.options.decay_from, self.options.decay_steps)
        self.best = 0.0  # tokens per round of the heads kept
        self.ranks: list[Tensor] = []  # of the windows of this validation, each (positions, K)
        self.sums: dict[str, float] = {}

    @property
    def base(self) -> WhisperForConditionalGeneration:
        return self.held[0]

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined] # undeclared by Lightning
        if not isinstance(data, HeadData):
            raise InputError(f"`data` must be HeadData for heads, but is {type(data).__name__}. Change the recipe.")
        model = data.model()
        self.mark = fingerprint(model)
        self.marks = {self.mark, fingerprint(model, with_path=True)}  # that a checkpoint may bear
        self.heads = first_heads(model, data.base, self.options.kind, self.count, self.options.start)
        dtype: torch.dtype = getattr(torch, self.options.base_dtype)
        device = self.trainer.strategy.root_device
        # In a tuple it is no submodule: not saved, not set to training, not moved or averaged by any strategy.
        model = model.to(device=device, dtype=dtype)  # type: ignore[call-arg] # pyright does not bind a decorated `to`
        self.held = (model.requires_grad_(False).eval(),)
        options = f"{self.mark}-{self.hparams['base_dtype']}-{self.hparams['max_tokens']}"
        self.labels = TokenStore(data.kept / f"labels-{options}", self.global_rank)
        self.states: StateStore | None = None
        if self.options.keep_states:
            folder = data.kept / f"states-{self.hparams['labels']}-{options}"
            self.states = StateStore(folder, model.config.d_model, self.global_rank)
            data.stored = self.states

    def read(self, batch: HeadBatch) -> TextPositions:
        """A batch's texts with the model's states: kept ones, or those of a pass."""
        whole = None
        if batch.features is None and self.states is not None:
            kept = [self.states.get(name) for name in batch.names]
            texts, hidden = [text for text, _ in kept], torch.cat([states for _, states in kept]).to(self.device)
        else:
            texts, hidden, whole = self.run_model(batch)
        at, targets, lengths, begin = [], [], [], 0
        for text in texts:
            count = max(len(text) - 1, 0)
            at.append(torch.arange(begin, begin + count))
            later = torch.tensor(text[1:] + [-1] * self.count)
            targets.append(later.unfold(0, self.count, 1)[:count])
            lengths.append(count)
            begin += len(text)
        return TextPositions(hidden, torch.cat(at).to(self.device), torch.cat(targets).to(self.device), lengths, whole)

    @torch.no_grad()
    def run_model(self, batch: HeadBatch) -> tuple[list[list[int]], Tensor, tuple[Tensor, Tensor, Tensor]]:
        """One encoder pass; the model's greedy text where no label is stored; one decoder pass over all texts."""
        model = self.base
        assert batch.features is not None
        with torch.autocast(self.device.type, enabled=False):
            states = model.model.encoder(batch.features.to(model.dtype)).last_hidden_state
            prompts = self._prompts(states, batch.prompts)
            texts = batch.truth if self.options.labels == "truth" else self._own(states, prompts, batch)
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
            features = features.half().float()  # as it is read when the window comes again
            parts = features.split([len(text) for text in texts])
            fresh = zip(batch.names, texts, parts, strict=True)
            self.states.add({name: (text, part) for name, text, part in fresh if name not in self.states})
        return texts, features, (hidden.float(), states.float(), where)

    def losses(self, positions: TextPositions) -> tuple[list[Tensor], Tensor]:
        """Each head's loss, and the ranks (P, K) of its targets, at most WIDTH; beyond the text WIDTH, too."""
        read, output = positions.hidden, self.base.proj_out.weight
        if self.heads.block is not None:
            assert positions.whole is not None
            hidden, states, where = positions.whole
            read = self.heads.through(hidden, states).flatten(0, 1)[where]
        ranks = torch.full_like(positions.targets, WIDTH)
        losses = []
        for index, head in enumerate(self.heads.heads):
            asked = (positions.targets[:, index] >= 0).nonzero()[:, 0]
            at = positions.at[asked]
            # The model's own distribution of head k + 1's target is k + 1 positions on.
            teacher = positions.hidden[at + index + 1] if self.options.kl else None
            loss, rank = head_loss(head(read[at]), output, positions.targets[asked, index], teacher, self.options.kl)
            ranks[asked, index] = rank.clamp(max=WIDTH)
            losses.append(loss)
        return losses, ranks

    def weighted(self, losses: Sequence[Tensor]) -> Tensor:
        return sum((w * loss for w, loss in zip(self.weights, losses, strict=True)), losses[0] * 0) / sum(self.weights)

    def training_step(self, batch: HeadBatch, batch_idx: int) -> Tensor:
        positions = self.read(batch)
        losses, ranks = self.losses(positions)
        loss = self.weighted(losses)
        asked = (positions.targets >= 0).sum(0).clamp(min=1)
        right = ((ranks == 0).sum(0) / asked).tolist()
        self.log("train/loss", loss.detach(), batch_size=len(positions.lengths), prog_bar=True)
        self.log_dict({f"train/head{k}": value for k, value in enumerate(right, 1)}, batch_size=len(positions.lengths))
        return loss

    def validation_step(self, batch: HeadBatch, batch_idx: int) -> None:
        positions = self.read(batch)
        losses, ranks = self.losses(positions)
        self.ranks += ranks.cpu().split(positions.lengths)
        self.sums["loss"] = self.sums.get("loss", 0.0) + float(self.weighted(losses)) * len(positions.lengths)
        self.sums["rows"] = self.sums.get("rows", 0.0) + len(positions.lengths)

    def on_validation_epoch_end(self) -> None:
        texts, sums = gather_ranks((self.ranks, self.sums))
        self.ranks, self.sums = [], {}
        chain, tree, chances = measure(texts, self.count, self.options.tree_nodes)
        scores = {"loss": sums["loss"] / sums["rows"], "chain": chain, "tree": tree}
        for head in range(self.count):
            first, top = spread(texts, head, (1, TOP))
            scores |= {f"head{head + 1}": first, f"head{head + 1}_top{TOP}": top}
        if self.trainer.sanity_checking:  # of the heads that a run begins with
            rank_zero_info(f"at the start: {chain:.2f} tokens a round in chains, {tree:.2f} in trees")
            if self.global_step:  # an unbroken run would not have looked here
                return
        else:
            self.log_dict({f"dev/{name}": value for name, value in scores.items()}, sync_dist=True)
        if tree > self.best and self.trainer.state.fn == TrainerFn.FITTING:
            self.best = tree
            if self.trainer.is_global_zero:
                self.keep(chances, scores)

    def on_train_end(self) -> None:
        if self.best == 0.0 and self.trainer.is_global_zero:
            self.keep(None, {})

    def keep(self, chances: list[list[float]] | None, scores: dict[str, float]) -> Path:
        """Write the heads to `heads/` in half precision, in place of those there."""
        folder = Path(self.trainer.default_root_dir) / "heads"
        with whole_folder(folder) as fresh:
            save_heads(fresh, copy.deepcopy(self.heads).half(), ranks=chances)
            options = {name: value for name, value in self.hparams.items() if not name.startswith("_")}
            training = {"step": self.global_step, "hyperparameters": options, "dev": scores}
            write_provenance(fresh, training, self.device)
        return folder

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"best": self.best, "base": self.mark}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["base"] not in self.marks:
            raise InputError(
                "`ckpt_path` must be of heads for the same `base`, but that has been trained or changed since. Start "
                "anew, with the heads of before as `start`."
            )
        self.best = checkpoint["best"]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        parameters = groups(self.heads.parameters(), self.options.weight_decay)
        first, second = self.options.betas
        optimizer = torch.optim.AdamW(parameters, lr=self.options.lr, betas=(first, second))
        return scheduled(optimizer, lambda step: self.rate(step))

    def _own(self, states: Tensor, prompts: list[list[int]], batch: HeadBatch) -> list[list[int]]:
        missing = [row for row, name in enumerate(batch.names) if self.labels.get(name) is None]
        if missing:
            fresh = own_text(
                self.base,
                states[missing],
                [prompts[row] for row in missing],
                [batch.timed[row] for row in missing],
                self.options.max_tokens,
                self.heads,
                self.options.draft_nodes,
            )
            self.labels.add({batch.names[row]: text for row, text in zip(missing, fresh, strict=True)})
        return [self.labels.tokens[name] for name in batch.names]

    def _prompts(self, states: Tensor, prompts: list[list[int]]) -> list[list[int]]:
        if not any(DETECT in prompt for prompt in prompts):
            return prompts
        encoded = BaseModelOutput(last_hidden_state=states)
        heard: list[int] = self.base.detect_language(encoder_outputs=encoded).tolist()
        return [
            [language if token == DETECT else token for token in prompt]
            for language, prompt in zip(heard, prompts, strict=True)
        ]
