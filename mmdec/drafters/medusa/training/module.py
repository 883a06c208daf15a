"""Training of Medusa heads on a frozen Whisper (Segal-Feldman et al. 2024, arXiv 2409.15869; Cai et al. 2024).

The Whisper is neither trained nor saved. Head k = 1 ... K reads the hidden state from which the model predicts token t
+ 1. It learns token t + 1 + k of the text that the model itself decodes greedily, because drafts are verified against
that text. (The paper's heads learn from transcripts.)

Validation simulates decoding to measure tokens per round. For this, each text of n tokens, EOS included, becomes a
matrix of ranks (n - 1, K). Row i belongs to a draft whose root is token i. Column k is the rank that head k gives to
the true token i + k; rank 0 is the likeliest token.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.functional import linear
from torch.optim import Optimizer
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdec.core.tree import HeadAccuracy, Node
from mmdec.drafters.medusa.checkpoint import load_heads, save_heads
from mmdec.drafters.medusa.drafter import MAX_RANKS, Medusa, default_chances
from mmdec.drafters.medusa.network import Kind, MedusaConfig, MedusaHeads
from mmdec.drafters.medusa.training.data import DETECT, HeadBatch, HeadData, decode_greedily, fingerprint
from mmdec.errors import InputError
from mmdec.hub.publish import atomic_folder
from mmdec.training.module import DrafterModule
from mmdec.training.optim import groups, token_weight
from mmdec.training.stores import EncodedWindows, HiddenStateStore, TokenStore

ITERATIONS = 3  # number of simulations with a tree; each measures the accuracies that shape the next tree


@dataclass(frozen=True)
class Simulation:
    """Totals of simulated decoding over all texts. The model's passes over prompts are not counted."""

    tokens: int
    rounds: int
    hits: list[list[int]]  # (K, WIDTH) how often the true token had rank r at depth k
    trials: list[int]  # (K,) how often depth k was reached

    @property
    def tokens_per_round(self) -> float:
        """Return the new tokens per pass of the target model, with the token that the target itself adds."""
        return self.tokens / self.rounds if self.rounds else 1.0


def simulate(texts: Sequence[Tensor], tree: Sequence[Node], heads: int) -> Simulation:
    """Simulate decoding with the same draft tree in all rounds.

    Args:
        texts: For each text the ranks (n - 1, K) of its true tokens.
        tree: The nodes of the draft tree without the root.
        heads: Number of heads, K.
    """
    children = {(parent, rank): node for node, (parent, _, rank) in enumerate(tree, 1)}
    hits, trials = [[0] * MAX_RANKS for _ in range(heads)], [0] * heads
    tokens = rounds = 0
    for text in texts:
        rows: list[list[int]] = text.tolist()
        at = 0
        while at < len(rows):
            node, accepted, left = 0, 0, len(rows) - at
            while (child := children.get((node, rows[at][accepted]) if accepted < heads else (-1, 0))) is not None:
                node, accepted = child, accepted + 1
                if accepted == left:
                    break
            gained = min(accepted + 1, left)
            for depth in range(min(gained, heads, 1 + max((level for _, level, _ in tree), default=-1))):
                trials[depth] += 1
                if rows[at][depth] < MAX_RANKS:
                    hits[depth][rows[at][depth]] += 1
            tokens, rounds, at = tokens + gained, rounds + 1, at + gained
    return Simulation(tokens, rounds, hits, trials)


def measure(texts: Sequence[Tensor], heads: int, nodes: int) -> tuple[float, float, list[list[float]]]:
    """Simulate decoding, first with a chain of one token from each head, then with trees.

    Args:
        texts: For each text the ranks (n - 1, K) of its true tokens.
        heads: K.
        nodes: Size of a tree.

    Returns:
        Tokens per round with chains, tokens per round with trees, and the accuracies (K, WIDTH): how often rank r was
        right at depth k, from 0 to 1.
    """
    chain = simulate(texts, HeadAccuracy(default_chances(heads)).tree(heads, heads), heads)
    chances, tree = estimate(chain), chain
    for _ in range(ITERATIONS if nodes > 0 else 0):
        tree = simulate(texts, HeadAccuracy(chances).tree(nodes, min(heads, max(nodes - 1, 1))), heads)
        chances = estimate(tree)
    return chain.tokens_per_round, tree.tokens_per_round, chances


def estimate(seen: Simulation) -> list[list[float]]:
    """Compute accuracies (K, WIDTH) from the counts of a simulation: how often rank r is right at depth k, from 0 to 1.
    For smoothing, the accuracies of depth k - 1 count as one more trial."""
    guess = default_chances(1)[0]
    chances = []
    for hits, trials in zip(seen.hits, seen.trials, strict=True):
        guess = [(hit + before) / (trials + 1) for hit, before in zip(hits, guess, strict=True)]
        chances.append(guess)
    return chances


def spread(texts: Sequence[Tensor], head: int, ranks: Sequence[int]) -> list[float]:
    """Return for each r in `ranks` how often, from 0 to 1, the true token is among a head's r likeliest tokens.

    Earlier heads need not be right.

    Args:
        texts: For each text the ranks (n - 1, K) of its true tokens.
        head: Its index from 0.
    """
    seen = [rank for text in texts for rank in text[: len(text) - head, head].tolist()]
    return [sum(rank < limit for rank in seen) / max(len(seen), 1) for limit in ranks]


def gather_ranks(part: tuple[list[Tensor], dict[str, float]]) -> tuple[list[Tensor], dict[str, float]]:
    """Join the rank matrices of all processes, and sum their values of the same name.

    Args:
        part: This process's matrices and values.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return part
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, part)
    sums: dict[str, float] = {}
    for _, ranks in parts:
        for name, value in ranks.items():
            sums[name] = sums.get(name, 0.0) + value
    return [text for texts, _ in parts for text in texts], sums


def first_heads(
    model: WhisperForConditionalGeneration, base: str, kind: Kind, count: int, start: str | None
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


CELLS = 1 << 25  # the most logits (positions x vocabulary) in memory at a time


class _FrozenOutput(torch.autograd.Function):
    """Computes the loss and also its gradient in the forward pass, for some of the N states at a time. So the logits of
    all states never have to be in memory together."""

    @staticmethod
    def forward(  # type: ignore[override] # torch declares it with any arguments
        ctx: Any, states: Tensor, output: Tensor, targets: Tensor, teacher: Tensor | None, weight: float, cells: int
    ) -> tuple[Tensor, Tensor]:
        wanted = states.requires_grad
        gradient = torch.empty_like(states) if wanted else None
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
    cells: int = CELLS,
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


TOP = 5  # validation logs how often the true token is among a head's five likeliest tokens


@dataclass(frozen=True)
class TextPositions:
    """The texts of a batch, N tokens in all, and the P positions in them from which heads predict."""

    hidden: Tensor  # (N, H) the decoder state from which the model predicts each token
    at: Tensor  # (P,) index in `hidden` of each position
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
            heads, 2 H bytes a token; the encoder's for a block, 2 S H bytes a window.
        vocabulary: 0, or the number of the most frequent tokens among the labels so far that the training loss compares
            a target with, beside the targets of the batch. The cost of a step on a processor is nearly proportional to
            it.
        tree_nodes: Number of nodes of the draft tree in validation. The heads with the most tokens per round with this
            tree are saved.
        base_dtype: Dtype of the frozen Whisper.
        warmup, decay_from, decay_steps: Steps of the learning rate: it rises for `warmup` steps, and falls to zero from
            step `decay_from` on, within `decay_steps`.
    """

    kind: Kind = "linear"
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

    def __init__(self, units: list[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["units"])
        self.use_options(MedusaOptions(**options))
        self.count = self.options.heads
        self.weights = [0.8**k if self.options.weights == "medusa" else 1.0 for k in range(1, self.count + 1)]
        self.ranks: list[Tensor] = []  # ranks of the texts of the current validation, each (positions, K)
        self.sums: dict[str, float] = {}

    @property
    def base(self) -> WhisperForConditionalGeneration:
        return self.frozen_base[0]

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined] # not declared by Lightning
        if not isinstance(data, HeadData):
            raise InputError(f"`data` must be HeadData for heads, but is {type(data).__name__}. Change the recipe.")
        model = data.model()
        self.mark = fingerprint(model)
        self.heads = first_heads(model, data.base, self.options.kind, self.count, self.options.start)
        dtype: torch.dtype = getattr(torch, self.options.base_dtype)
        device = self.trainer.strategy.root_device
        # Inside a tuple, the model is not a submodule: Lightning does not save, train, move or average it.
        model = model.to(device=device, dtype=dtype)  # type: ignore[call-arg] # pyright does not bind a decorated `to`
        self.frozen_base = (model.requires_grad_(False).eval(),)
        options = f"{self.mark}-{self.options.base_dtype}-{self.options.max_tokens}"
        self.labels = TokenStore(data.kept / f"labels-{options}", self.global_rank)
        self.counts: Counter[int] = Counter(token for text in self.labels.tokens.values() for token in text)
        self.states: HiddenStateStore | None = None
        self.encoded: EncodedWindows | None = None
        if self.options.keep_states and self.options.kind == "block":
            folder = data.kept / f"encoded-{self.options.labels}-{options}"
            self.encoded = data.stored = EncodedWindows(folder, model.config.d_model, self.global_rank)
        elif self.options.keep_states:
            folder = data.kept / f"states-{self.options.labels}-{options}"
            self.states = data.stored = HiddenStateStore(folder, model.config.d_model, self.global_rank)

    def read(self, batch: HeadBatch) -> TextPositions:
        """Return the texts of a batch with the model's decoder states, which are stored or computed now."""
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
        """Return each head's loss, and the ranks (P, K) of the target tokens. A rank is at most WIDTH, and WIDTH after
        the text's end."""
        read, output = positions.hidden, self.base.proj_out.weight
        if self.heads.block is not None:
            assert positions.whole is not None
            hidden, states, where = positions.whole
            read = self.heads.through(hidden, states).flatten(0, 1)[where]
        ranks = torch.full_like(positions.targets, MAX_RANKS)
        targets = positions.targets
        if self.training and self.options.vocabulary:
            output, targets = self._frequent(output, targets)
        losses = []
        weights = token_weight((positions.targets >= 0).sum(0))
        for index, head in enumerate(self.heads.heads):
            asked = (positions.targets[:, index] >= 0).nonzero()[:, 0]
            at = positions.at[asked]
            # The head predicts a token that the model itself predicts `index` + 1 positions later.
            teacher = positions.hidden[at + index + 1] if self.options.kl else None
            loss, rank = head_loss(head(read[at]), output, targets[asked, index], teacher, self.options.kl)
            ranks[asked, index] = rank.clamp(max=MAX_RANKS)
            losses.append(loss * weights[index])
        return losses, ranks

    def _frequent(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Restrict the output matrix (V, H) to the frequent tokens and the targets (P, K). Returns: its rows (v, H),
        and the targets as indices of these rows; -1 stays."""
        frequent = [token for token, _ in self.counts.most_common(self.options.vocabulary)]
        ids = torch.cat([targets[targets >= 0].cpu(), torch.tensor(frequent, dtype=torch.long)]).unique()
        ids = ids.to(output.device)
        return output[ids], torch.where(targets >= 0, torch.searchsorted(ids, targets.clamp(min=0)), targets)

    def weighted_loss(self, losses: Sequence[Tensor]) -> Tensor:
        return sum((w * loss for w, loss in zip(self.weights, losses, strict=True)), losses[0] * 0) / sum(self.weights)

    def training_step(self, batch: HeadBatch, batch_idx: int) -> Tensor:
        positions = self.read(batch)
        losses, ranks = self.losses(positions)
        loss = self.weighted_loss(losses)
        asked = (positions.targets >= 0).sum(0).clamp(min=1)
        right = ((ranks == 0).sum(0) / asked).tolist()
        self.log("train/loss", loss.detach(), batch_size=len(positions.lengths), prog_bar=True, sync_dist=True)
        self.log_dict({f"train/head{k}": value for k, value in enumerate(right, 1)}, batch_size=len(positions.lengths))
        return loss

    def validation_step(self, batch: HeadBatch, batch_idx: int) -> None:
        positions = self.read(batch)
        losses, ranks = self.losses(positions)
        self.ranks += ranks.cpu().split(positions.lengths)
        self.sums["loss"] = self.sums.get("loss", 0.0) + float(self.weighted_loss(losses)) * len(positions.lengths)
        self.sums["rows"] = self.sums.get("rows", 0.0) + len(positions.lengths)

    def on_validation_epoch_end(self) -> None:
        texts, sums = gather_ranks((self.ranks, self.sums))
        self.ranks, self.sums = [], {}
        chain, tree, chances = measure(texts, self.count, self.options.tree_nodes)
        scores = {"loss": sums["loss"] / sums["rows"], "chain": chain, "tree": tree}
        for head in range(self.count):
            first, top = spread(texts, head, (1, TOP))
            scores |= {f"head{head + 1}": first, f"head{head + 1}_top{TOP}": top}
        # Lightning's check before training: these scores are those of the initial heads
        if self.trainer.sanity_checking:
            rank_zero_info(f"at the start: {chain:.2f} tokens a round in chains, {tree:.2f} in trees")
            # a resumed training is validated once more at its beginning; this is not logged
            if self.global_step:
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
        """Save the heads in half precision in the folder `heads/` below the trainer's root folder, in place of earlier
        ones.

        Args:
            chances: (K, WIDTH); [k][r] is the share of positions, from 0 to 1, at which head k's candidate of rank r is
                right. None: not measured.
            scores: Validation scores by name.

        Returns:
            The path of `heads/`.
        """
        folder = Path(self.trainer.default_root_dir) / "heads"
        with atomic_folder(folder) as fresh:
            save_heads(fresh, copy.deepcopy(self.heads).half(), ranks=chances, place=folder)
            self.write_training(fresh, scores)
        return folder

    def optimizer(self) -> Optimizer:
        parameters = groups(self.heads.parameters(), self.options.weight_decay)
        first, second = self.options.betas
        return torch.optim.AdamW(parameters, lr=self.options.lr, betas=(first, second))

    def _own(self, states: Tensor, prompts: list[list[int]], batch: HeadBatch) -> list[list[int]]:
        missing = [row for row, name in enumerate(batch.names) if self.labels.get(name) is None]
        if missing:
            nodes, asked = self.options.draft_nodes, [prompts[row] for row in missing]
            # The heads in training may have another dtype than the model, so a converted copy drafts.
            drafter = Medusa(copy.deepcopy(self.heads).to(self.base.dtype), self.base.proj_out) if nodes else None
            timed = [batch.timed[row] for row in missing]
            fresh = decode_greedily(self.base, states[missing], asked, timed, self.options.max_tokens, drafter, nodes)
            self.labels.add({batch.names[row]: text for row, text in zip(missing, fresh, strict=True)})
            self.counts.update(token for text in fresh for token in text)
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
