"""Training of a drafter that reads its target's features (hidden states): the code that all such drafters share.

The target is frozen: no gradient passes through it, and Lightning neither saves nor moves it. One target pass over
prompt and answer gives inputs and labels of all unrolled drafting steps. Features can be stored on disk, for samples
that are used again. Only answer tokens count in the loss.

Validation simulates decoding. For this it needs only the rank that the drafter gives to each true next token, with
every answer token as a root. Accepted drafts equal the answer, so its features are those of real decoding.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import smooth_l1_loss
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from mmdec.core.statistics import DecodingStatistics
from mmdec.core.tree_shape import MAX_RANKS
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.training.data import DraftBatch, DraftData
from mmdec.drafters.networks.training.simulation import measure
from mmdec.drafters.networks.training.teacher import FeatureStore, TargetFeatures, Teacher
from mmdec.drafters.networks.training.unroll import UnrollInputs, unroll_inputs, unroll_steps
from mmdec.drafters.networks.weights import DrafterWeights
from mmdec.drafters.registry import network_class
from mmdec.errors import InputError
from mmdec.generation.generate import generate
from mmdec.hub.publish import atomic_folder
from mmdec.pretrained.drafters import draft_card, load_drafter, load_network, save_network
from mmdec.training.callbacks import ESTIMATED_CHAIN_LENGTH
from mmdec.training.checkpoints import check_positive
from mmdec.training.module import DrafterModule
from mmdec.training.optim import MuonAdamW, groups, token_weight
from mmdec.types import Needs

MAX_LOGITS = 1 << 26  # maximum logits (positions x vocabulary) in memory at a time; more are computed in pieces
RANKED_TOKENS = 10  # the ListMLE loss compares the order of this many of the target's likeliest tokens
T = TypeVar("T")
LM_HEAD = "lm_head"  # beginning of the names of a network's LM heads, if it has any; AdamW trains them, not Muon


@dataclass(frozen=True)
class LossWeights:
    """Weights of the parts of the loss. EAGLE, MSD and SpecVLM use 1 for `features` and 0.1 for `tokens`.

    Args:
        features: SmoothL1 loss of the features, mean over channels.
        tokens: Cross-entropy with the target's distribution.
        distribution: L1 distance of the drafter's and the target's distribution, summed over the vocabulary.
        ranks: ListMLE of the target's ten best tokens.
    """

    features: float = 1.0
    tokens: float = 0.1
    distribution: float = 0.0
    ranks: float = 0.0

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 0 or not any(vars(self).values()):
            raise InputError(
                f"`weights` must be 0 or more, and one of them above 0, but are {vars(self)}. Leave them out for "
                "EAGLE's."
            )

    def logit_loss(self, drafted: Tensor, expected: Tensor) -> Tensor:
        """Return the weighted loss (P,) of the drafter's logits (P, V); `features` has no part in it.

        Args:
            drafted: The drafter's logits.
            expected: The target's logits (P, V).
        """
        weights = vars(self)
        parts = (weights[name] * loss(drafted, expected) for name, loss in LOSSES.items() if weights[name])
        return sum(parts, drafted.new_zeros(len(drafted)))


def feature_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """Return the SmoothL1 loss (P,) between features (P, H) at P positions, averaged over the H channels."""
    return smooth_l1_loss(predicted, expected, reduction="none").mean(-1)


def token_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """Return the cross-entropy (P,) of the drafter's logits (P, V) over V tokens with the target's distribution."""
    return -(expected.softmax(-1) * predicted.log_softmax(-1)).sum(-1)


def distribution_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """Return the L1 distance (P,) between the distributions of the drafter's and the target's logits (P, V)."""
    return (predicted.softmax(-1) - expected.softmax(-1)).abs().sum(-1)


def rank_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """Return the ListMLE loss (P,) (Xia et al. 2008) of the drafter's logits (P, V) over V tokens.

    It is minus the log-probability of the order of the target's ten likeliest tokens, under the Plackett-Luce model
    with the drafter's logits as scores.

    Args:
        expected: The target's logits (P, V).
    """
    order = expected.topk(min(RANKED_TOKENS, expected.shape[-1]), -1).indices
    scores = predicted.gather(-1, order)
    rest = scores.flip(-1).logcumsumexp(-1).flip(-1)  # log-sum-exp of each token's score and those after it
    return (rest - scores).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tokens": token_loss,
    "distribution": distribution_loss,
    "ranks": rank_loss,
}


def in_pieces(function: Callable[..., T], vocab_size: int, *rows: Tensor, cells: int | None = None) -> list[T]:
    """Call `function` on the tensors `rows`, (P, ...), on some of the P entries at a time, to save memory.

    Args:
        function: Computes logits of these entries.
        vocab_size: Number of logits of an entry.
        cells: Maximum logits in memory at a time; None: `MAX_LOGITS`.

    Returns:
        A list of results. With several calls, activations are recomputed in the backward pass, not stored.
    """
    width = max(1, (cells or MAX_LOGITS) // vocab_size)
    if len(rows[0]) <= width:
        return [function(*rows)]
    pieces = zip(*(part.split(width) for part in rows), strict=True)
    return [cast(T, checkpoint(function, *piece, use_reentrant=False)) for piece in pieces]


def concat_pieces(function: Callable[..., tuple[Tensor, ...]], vocab_size: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """Call a function like `in_pieces`, and concatenate each of the tensors (P,) that it returns."""
    return tuple(torch.cat(part) for part in zip(*in_pieces(function, vocab_size, *rows), strict=True))


class StepTotals:
    """Adds up the drafting steps of a batch: the loss, and the tokens that simulated rounds of decoding accept.

    Args:
        is_root: (B, R) bool, the tokens from which drafts begin; False at padding.
        weights: (depth,), the factors on the steps' mean losses, from `token_weight`.
        decay: Weight of a step's loss relative to the step before.
    """

    def __init__(self, is_root: Tensor, weights: Tensor, decay: float) -> None:
        self.parts: dict[str, Tensor] = {}  # name -> value for the log
        self._is_root, self._weights, self._decay = is_root, weights, decay
        self._step, self._loss = 0, weights.new_zeros(())
        self._alive, self._accepted = is_root, weights.new_zeros(())  # roots whose drafts are right so far

    def add(self, loss: Tensor, has_target: Tensor, right: Tensor) -> None:
        """Add the next drafting step.

        Args:
            loss: The mean over its P compared tokens.
            has_target: (B, at most R) bool, True at the first tokens of drafts that have a compared token at this step.
            right: (P,) 1 where drafter and target have the same likeliest token, else 0; in the order of `has_target`.
        """
        self._loss = self._loss + self._decay**self._step * self._weights[self._step] * loss
        if len(right):
            self.parts["right" + (str(self._step + 1) if self._step else "")] = right.mean()
        if self._step < ESTIMATED_CHAIN_LENGTH:
            hits = torch.zeros_like(has_target).masked_scatter(has_target, right > 0)
            self._alive = self._alive[:, : hits.shape[1]] & hits
            self._accepted = self._accepted + self._alive.sum()
        self._step += 1

    def result(self) -> Mapping[str, Tensor]:
        """Return name -> value: the batch's "loss", "right", "right2", ..., and "round".

        "right", "right2", ... say for each step how often drafter and target have the same likeliest token. "round" is
        the estimated tokens per round of decoding with chains of `ESTIMATED_CHAIN_LENGTH` drafted tokens, if there are
        so many steps.
        """
        parts = {**self.parts, "loss": self._loss}
        if len(self._weights) >= ESTIMATED_CHAIN_LENGTH:
            parts["round"] = 1 + self._accepted / self._is_root.sum()
        return parts


def losses(
    predicted: Tensor,
    expected: Tensor,
    logits: Callable[[Tensor], Tensor],
    weights: LossWeights,
    cells: int | None = None,
) -> Mapping[str, Tensor]:
    """Compare the drafter's features (P, H) with the target's.

    Args:
        logits: The LM head, (P, H) -> (P, V).
        weights: Weights of the loss's parts.
        cells: Maximum logits in memory at a time; None: `MAX_LOGITS`.

    Returns:
        Name -> value: "loss", the weighted sum; its parts; and "right", the share of positions at which drafter and
        target have the same likeliest token.
    """
    parts: dict[str, Tensor] = {"features": feature_loss(predicted, expected).mean()}

    def logit_losses(predicted: Tensor, expected: Tensor) -> Tensor:
        drafted, teacher = logits(predicted), logits(expected)
        sums = [
            LOSSES[name](drafted, teacher).sum() if getattr(weights, name) else drafted.new_zeros(()) for name in LOSSES
        ]
        return torch.stack([*sums, (drafted.argmax(-1) == teacher.argmax(-1)).to(drafted.dtype).sum()])

    vocab_size = logits(expected[:1]).shape[-1]
    sums = torch.stack(in_pieces(logit_losses, vocab_size, predicted, expected, cells=cells)).sum(0)
    parts |= dict(zip((*LOSSES, "right"), sums / len(predicted), strict=True))
    parts["right"] = parts["right"].detach()
    total = sum((getattr(weights, name) * parts[name] for name in ("features", *LOSSES)), predicted.new_zeros(()))
    logged = {name: value for name, value in parts.items() if name == "right" or getattr(weights, name)}
    return {"loss": total, **logged}


@dataclass(frozen=True)
class DraftTrainingOptions:
    """Options of `DraftModule` that a recipe sets.

    Args:
        network: Changes to the network's configuration; by default the network is like one layer of the target.
        start: Folder of a saved network to begin from.
        half_teacher: Compute the target's matrix products in bfloat16, if the device is fast in it.
        unroll: Number of unrolled drafting steps: the first reads the target's features, the others the network's own.
        unroll_from: Before this training step, `unroll` is 1, which is faster.
        unroll_decay: Loss weight of a drafting step relative to the step before.
        through: Let gradients flow from a drafting step into earlier ones.
        noise: Random noise of up to noise * 512 / (length of the text in tokens) is added to the features.
        tokens, features, distribution, ranks: Weights of the parts of the loss; null: those of the drafter's paper.
        keep_features: Store features on disk (2 H bytes per token and layer), so that the target reads each sample only
            once.
        chain, tree_nodes: Sizes of the drafts that validation simulates to log tokens per round.
        decoded: Number of questions that validation also decodes for real, with trees of `tree_nodes` nodes.
    """

    network: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    half_teacher: bool = False
    unroll: int = 1
    unroll_from: int = 0
    unroll_decay: float = 1.0
    through: bool = True
    noise: float = 0.1
    features: float | None = None
    tokens: float | None = None
    distribution: float | None = None
    ranks: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: Literal["trapezoid", "cosine"] = "trapezoid"
    warmup: int = 2000
    decay_from: int | None = None
    decay_steps: int = 800_000
    keep_features: bool = False
    chain: int = 7
    tree_nodes: int = 16
    decoded: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(unroll=self.unroll, chain=self.chain)
        if self.noise < 0:
            raise InputError(f"`noise` must be 0 or more, but is {self.noise}. 0.1 is EAGLE's.")


def fsdp_wrapper(trainer: Trainer) -> FullyShardedDataParallel | None:
    """Return the FSDP wrapper of the network, if its weights are sharded; None if every process has all weights."""
    wrapped: nn.Module | None = trainer.strategy.model
    return wrapped if isinstance(wrapped, FullyShardedDataParallel) else None


@contextmanager
def whole_weights(trainer: Trainer) -> Iterator[None]:
    """Within the `with` block, every process can read all weights, even sharded ones. All processes must enter it."""
    wrapped = fsdp_wrapper(trainer)
    if wrapped is None:
        yield
        return
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        yield


@torch.no_grad()
def rank_texts(
    columns: UnrollInputs,
    steps: Sequence[Tensor],
    logits: Callable[[Tensor, int], Tensor],
    drafted: Tensor | None = None,
) -> list[Tensor]:
    """Compute the rank that the drafter gives to each true token, for simulated decoding; its likeliest has rank 0.

    Args:
        columns: The network's inputs.
        steps: [d]: the drafter's states (B, N - d, H) at depth d, without noise; entry r belongs to root r.
        logits: Called with the states (..., H) of a depth, and with the depth from 0; returns logits (..., V).
        drafted: (V,), each token's index among the logits, -1 if it cannot be drafted; None: the index is the token's
            id.

    Returns:
        For each text of A answer tokens a tensor (A - 1, depth) int64 on the CPU. Entry [r, d] is the rank of token r +
        1 + d if token r is the root, at most MAX_RANKS; beyond the text's end it is MAX_RANKS.
    """
    lengths = columns.mask.sum(1).tolist()
    rows, width = columns.mask.shape
    tokens, is_counted = columns.next_tokens, columns.mask
    if drafted is not None:
        tokens = drafted[tokens]
        is_counted = is_counted & (tokens >= 0)
        tokens = tokens.clamp(min=0)
    ranks = torch.full((rows, width, len(steps)), MAX_RANKS)
    for depth, hidden in enumerate(steps):
        scores = logits(hidden, depth)
        own_scores = scores.gather(-1, tokens[:, depth:, None])
        step_ranks = (scores > own_scores).sum(-1).clamp(max=MAX_RANKS)  # (B, N - depth), for each root
        ranks[:, : width - depth, depth] = step_ranks.masked_fill(~is_counted[:, depth:], MAX_RANKS).cpu()
    return [ranks[row, :length] for row, length in enumerate(lengths)]


class DraftModule(DrafterModule):
    """Abstract base of the training modules of all drafters.

    A subclass sets `system`, the drafter's name, and changes the loss or the drafting steps. The target is the data
    module's `base`.

    The network with the most tokens per round in simulated chains is saved in the folder `drafter` of the trainer's
    root folder, for `mmdec.load_drafter`.

    Args:
        units: Not used.
        options: Fields of `DraftTrainingOptions`.
    """

    system: ClassVar[str]
    # name of a head -> changes to the network's configuration; empty: there is no choice of heads
    heads: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    decides = "chain"
    weights: ClassVar[LossWeights] = LossWeights()
    # score -> its name in the lines that `StageBar` prints
    words: ClassVar[Mapping[str, str]] = {"chain": "tokens per round in chains", "tree": "in trees"}

    def __init__(self, units: list[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["units"])
        self.use_options(DraftTrainingOptions(**options))
        self.loss_weights = self.chosen_weights(self.weights)

    def chosen_weights(self, defaults: LossWeights) -> LossWeights:
        """Return these weights of the loss's parts, changed by the recipe's."""
        chosen = {name: value for name in vars(defaults) if (value := getattr(self.options, name)) is not None}
        return LossWeights(**{**vars(defaults), **chosen})

    @property
    def teacher(self) -> Teacher:
        return self.frozen_teacher[0]

    @property
    def data(self) -> DraftData:
        """The trainer's data module."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined] # not typed by Lightning
        if not isinstance(data, DraftData):
            raise InputError(f"`data` must be DraftData for drafters, but is {type(data).__name__}. Change the recipe.")
        return data

    def setup(self, stage: str) -> None:
        data = self.data
        teacher = data.teacher
        teacher.model.to(self.trainer.strategy.root_device)  # type: ignore[call-arg] # pyright misreads `to`
        # in a tuple, so that torch does not register the target: it is not saved or trained
        self.frozen_teacher = (teacher,)
        self.base_fingerprint = teacher.name
        # recorded in the network's configuration
        self.names = {"base": self.base_fingerprint, "target": data.target_name}
        self.network: Any = self.first_network()
        self.needs = self.training_needs(self.network.config)
        self.store: FeatureStore | None = None
        if self.options.keep_features:
            self.store = data.feature_store(self.needs, self.options.half_teacher, self.global_rank)
            data.stored = self.store

    def training_needs(self, config: Any) -> Needs:
        """Return which hidden states and embeddings of the target training needs.

        They are those that the network reads, and those that the loss compares with.
        """
        return Needs(layers=config.layers, embeds=config.projected)

    def draft_config(self, teacher: Teacher) -> DraftConfig:
        """Return the configuration of a new network: sizes of the target's layers, changed by the option `network`."""
        return network_class(self.system).config_class.like(teacher.config, **self.options.network)

    def first_network(self) -> DrafterWeights[Any]:
        """Return the network that training begins with: a new one, or the one in the folder `start`."""
        kind, target = network_class(self.system), self.teacher.model
        if self.options.start is not None:
            network = load_network(Path(self.options.start), target)
            if type(network) is not kind:
                raise InputError(
                    f"`start` must hold a drafter of {self.system}, but holds one of {network.system}. "
                    "Give such a folder."
                )
            # the folder `start` may name another target, or an older state of it
            network.config = replace(network.config, **self.names)
            return network.float().train()
        torch.manual_seed(self.options.seed)
        return kind(replace(self.draft_config(self.teacher), **self.names))

    def target_features(self, batch: DraftBatch) -> list[TargetFeatures]:
        """Return the target's features of each text of a batch. They are read from disk or computed now."""
        if self.store is not None:
            readings = self.store.load_or_compute(batch.rows, batch.prompts, batch.answers)
        else:
            assert batch.prompts is not None
            readings = self.teacher.compute_features(
                batch.prompts, batch.answers, self.needs, self.options.half_teacher
            )
        return [reading.to(self.device) for reading in readings]

    def columns(self, texts: Sequence[TargetFeatures], noise: float = 0.0) -> UnrollInputs:
        """Return the network's inputs for a batch.

        Args:
            texts: The target's features, first those that the network reads, then those for the loss.
            noise: Random noise of up to noise * 512 / length is added to the features.
        """
        config = self.network.config
        size = len(config.layers) * config.target_size
        return unroll_inputs(self.network, [replace(text, features=text.features[:, :size]) for text in texts], noise)

    def loss(self, texts: list[TargetFeatures], noise: float = 0.0) -> Mapping[str, Tensor]:
        """Return name -> value: the batch's "loss", and other values for the log.

        Args:
            texts: The target's features.
            noise: Random noise of up to noise * 512 / length is added to the features.
        """
        return self.compare(self.columns(texts, noise), texts)

    def rank(self, texts: list[TargetFeatures]) -> list[Tensor]:
        """For simulated decoding: compute how the drafter ranks the true tokens.

        Returns:
            For each text with A answer tokens a tensor (A - 1, depth). Entry [r, d] belongs to a draft whose root is
            token r: it is the rank, 0 for the likeliest, that the drafter gives to the true token r + 1 + d.
        """
        columns = self.columns(texts)
        return rank_texts(columns, self.steps(columns, self.chain), self.step_logits, self.draft_indices)

    @property
    def draft_indices(self) -> Tensor | None:
        """The index (V,) int64 of each of the target's tokens in the draft vocabulary.

        It is -1 if the token cannot be drafted. None: all tokens can be drafted.
        """
        return None

    def step_logits(self, states: Tensor, depth: int) -> Tensor:
        """Compute the logits (..., V) float32 of the tokens at one depth, by which validation ranks them.

        Args:
            states: (..., H), from `steps`.
            depth: From 0.
        """
        return self.teacher.logits(states)

    def steps(self, columns: UnrollInputs, count: int) -> list[Tensor]:
        """Draft `count` tokens from each of the N answer tokens as a root.

        Returns:
            For each depth s from 0 the network's features (B, N - s, H); entry c predicts the feature of answer token c
            + s.
        """
        return unroll_steps(self.network, columns, count, self.options.through)

    def compare(self, columns: UnrollInputs, texts: list[TargetFeatures]) -> Mapping[str, Tensor]:
        """Return name -> value: the batch's "loss", and values for the log.

        The log gets the parts of the first drafting step's loss, and "right", "right2", ...: in each step, how often
        drafter and target have the same likeliest token.
        """
        expected = target_states(texts, self.teacher.config.hidden_size, self.needs.layers)
        total: Tensor = columns.states.new_zeros(())
        parts: dict[str, Tensor] = {}
        weights = step_weights(columns.mask, self.depth)
        for step, hidden in enumerate(self.steps(columns, self.depth)):
            has_target = columns.mask[:, step:]
            step_losses = losses(
                hidden[has_target], expected[:, step:][has_target], self.teacher.logits, self.loss_weights
            )
            total = total + self.options.unroll_decay**step * weights[step] * step_losses["loss"]
            parts |= step_losses if step == 0 else {f"right{step + 1}": step_losses["right"]}
        return {**parts, "loss": total}

    @property
    def depth(self) -> int:
        """The number of drafting steps that training unrolls."""
        return 1 if self.training and self.global_step < self.options.unroll_from else self.options.unroll

    @property
    def chain(self) -> int:
        """The number of tokens of the chains that validation simulates."""
        return self.options.chain

    def training_step(self, batch: DraftBatch, batch_idx: int) -> Tensor:
        texts = self.target_features(batch)
        parts = self.loss(texts, self.options.noise)
        self.log_parts(parts, len(batch.rows))
        return parts["loss"]

    def log_parts(self, parts: Mapping[str, Tensor], rows: int) -> None:
        """Log name -> value of a training step on this number of rows."""
        for name, value in parts.items():
            # other values are not averaged over processes, because some processes may not have them
            loss = name == "loss"
            self.log(f"train/{name}", value.detach(), batch_size=rows, prog_bar=loss, sync_dist=loss)

    def validation_step(self, batch: DraftBatch, batch_idx: int) -> None:
        texts = self.target_features(batch)
        self.add_validation(self.rank(texts), float(self.loss(texts)["loss"]))

    def score(self, texts: list[Tensor]) -> dict[str, float]:
        chain, tree, probabilities = measure(texts, self.chain, self.options.tree_nodes)
        self.keep_probabilities(probabilities)
        scores = {"chain": chain, "tree": tree}
        if self.options.decoded and not self.trainer.sanity_checking:
            scores["decoded"] = self.decode()
        return scores

    def keep_probabilities(self, probabilities: list[list[float]]) -> None:
        """Store in the network's configuration how often each rank was right at each depth, if its drafter reads it."""

    def decode(self) -> float:
        """Decode the first `decoded` questions of the development split with trees.

        Returns:
            The tokens per round.
        """
        data, model, depth = self.data, self.teacher.model, min(self.chain, self.options.tree_nodes)
        counts = torch.zeros(2, device=self.device)
        with whole_weights(self.trainer), tempfile.TemporaryDirectory() as folder:
            save_network(copy.deepcopy(self.network), folder)
            drafter = load_drafter(folder, model)
            for sample in data.parts["dev"][: self.options.decoded][self.global_rank :: self.trainer.world_size]:
                inputs = self.teacher.to_device(data.prompting(sample))
                generation = generate(
                    model,
                    inputs,
                    drafter,
                    rule="greedy",
                    num_speculative_tokens=(self.options.tree_nodes, depth),
                    statistics=DecodingStatistics(),
                    max_new_tokens=data.options.max_tokens,
                )
                new_tokens = generation.sequences.shape[1] - inputs["input_ids"].shape[1]
                # the pass over the prompt, and the token that it gives, are not counted
                counts += torch.tensor([new_tokens - 1, len(generation.rounds) - 1], device=self.device)
        tokens, rounds = self.all_gather(counts).reshape(-1, 2).sum(0).tolist()  # type: ignore[union-attr] # a tensor
        return tokens / max(rounds, 1)

    def save_drafter(self, scores: dict[str, float]) -> Path:
        """Save the network in half precision in the folder `drafter` below the trainer's root folder."""
        folder = Path(self.trainer.default_root_dir) / "drafter"
        with whole_weights(self.trainer):
            if self.trainer.is_global_zero:
                self._write(folder, scores)
        return folder

    def _write(self, folder: Path, scores: dict[str, float]) -> None:
        with atomic_folder(folder) as fresh:
            card = draft_card(self.network, reads_images=bool(self.teacher.marks))
            save_network(copy.deepcopy(self.network).half(), fresh, card=card)
            self.write_training(fresh, scores)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients. If weights are sharded, the norm is that over all shards, which Lightning (2.6) cannot do."""
        wrapped = fsdp_wrapper(self.trainer)
        if wrapped is None or gradient_clip_val is None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            wrapped.clip_grad_norm_(gradient_clip_val)

    def optimizer(self) -> Optimizer:
        options = self.options
        if options.optimizer == "muon":
            if fsdp_wrapper(self.trainer) is not None:
                raise InputError("`optimizer` must be adamw where weights are sharded, but is muon. Use ddp, or adamw.")
            linear = {id(part.weight) for part in self.network.modules() if isinstance(part, nn.Linear)}
            return MuonAdamW.for_parameters(
                self.network.named_parameters(),
                lambda name, weight: id(weight) in linear and not name.startswith(LM_HEAD),
                options.lr,
                options.weight_decay,
                options.betas,
            )
        parameters = groups(self.network.parameters(), options.weight_decay)
        return torch.optim.AdamW(parameters, lr=options.lr, betas=options.betas)


def step_weights(has_target: Tensor, depth: int) -> Tensor:
    """Return the factors (depth,) on the mean losses of the drafting steps.

    With them, each token has the same weight in all processes.

    Args:
        has_target: (B, N) bool, the answer tokens that count. Step s counts only tokens from index s on; if this
            process's answers are too short, there are none.
    """
    return token_weight(torch.stack([has_target[:, step:].sum() for step in range(depth)]))


def target_states(texts: Sequence[TargetFeatures], size: int, layers: tuple[int, ...]) -> Tensor:
    """Return the inputs of the target's LM head at the answers' tokens, (B, N, H), padded on the right.

    Args:
        size: H.
        layers: The target layers whose features `texts` hold, which must include -1, the LM head's input.
    """
    if -1 not in layers:
        raise InputError(f"`layers` must hold -1, the LM head's input, but are {list(layers)}. Add it.")
    begin = layers.index(-1) * size
    parts = [text.features[text.prompt :, begin : begin + size] for text in texts]
    return nn.utils.rnn.pad_sequence(parts, batch_first=True)
