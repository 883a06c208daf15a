"""Training of the small vision-language model in two phases: first the image encoder alone, then the whole model.

The loss of the language model alone trains a randomly initialised encoder very slowly. So the encoder is first trained
by itself to recognise what image patches show (letters, objects, colours). Then the whole model is trained, on this
task and on the answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig

from mmdec.checks.devices import fast_bfloat16
from mmdec.checks.files import one_line
from mmdec.training.checkpoints import keep_options, read_checkpoint
from mmdec.training.metrics.text import claims_held, right_answer
from mmdec.training.optim import MuonAdamW, Schedule, scheduled, token_weight
from mmdec.training.vlm.data import Asked
from mmdec.training.vlm.network import (
    CellHeads,
    Shape,
    Whitening,
    build_model,
    cell_loss,
    language_layer,
    see,
    speak,
    vision_layer,
)
from mmdec.training.vlm.tokens import BEGIN, END, IGNORED, IMAGE, NOWHERE, PAD, PRINTED, Batch, turn_mask
from mmdec.types import InputError

TASKS = (
    "clock", "colour", "count", "degrees", "describe", "item_of", "kind", "number", "position",
    "price", "price_of", "relation", "route", "shape", "size", "time", "time_of",
    "town_of", "where", "word", "yes_no",
)  # fmt: skip
CELLS = 8  # number of cells of one image patch; each cell has labels of what it shows
LONGEST = (48, 200)  # maximum new tokens in validation: of a short answer, and of a description


@dataclass(frozen=True)
class VlmOptions:
    """Options of `VlmModule` that a training configuration sets.

    lr, vision_lr: learning rates of the second and the first phase. vision_steps: number of steps of the first phase,
        which trains the encoder alone.
    warmup: steps at the beginning of each phase in which the learning rate rises.
    decay_from, decay_steps: step at which the learning rate begins to fall, and number of steps until it is zero.
    cell_weight, guide_weight: weights of L_cells and L_guide in the loss (see `VlmModule`).
    cell_kinds: number of classes of the two labels of a cell: what it shows, and its colour. empty: weight in L_cells
        of cells that show nothing.
    guided: indices of the language model's layers that L_guide trains; None: those at one third, half and two thirds of
        the depth.
    length_power: an answer of n tokens has the weight n ** (1 - length_power) in the loss. At 0 a description weighs as
        much as a hundred short answers, and colours and sizes are learned last.
    half: compute matrix products in bfloat16; None: only if the CPU is fast in it. compiled: use torch.compile.
    start: a folder with an exported model, or a training checkpoint, whose weights training begins with.
        fresh_projector: whether the projector is initialised anew all the same.
    """

    lr: float = 3e-3
    vision_lr: float = 4.5e-3
    vision_steps: int = 1000
    warmup: int = 100
    decay_from: int | None = None
    decay_steps: int = 1000
    weight_decay: float = 0.01
    cell_weight: float = 0.3
    cell_kinds: tuple[int, int] = (54, 11)
    empty: float = 0.2
    guided: Sequence[int] | None = None
    guide_weight: float = 0.3
    length_power: float = 0.5
    half: bool | None = None
    compiled: bool = False
    start: str | None = None
    fresh_projector: bool = False
    seed: int = 0


class VlmModule(LightningModule):
    """Trains the model with the loss L_answers + cell_weight L_cells + guide_weight L_guide; in the first
    `vision_steps` steps with L_cells alone.

    L_answers: cross-entropy of the answer tokens. L_cells: cross-entropy of what each cell of each image patch shows.
        L_guide teaches the language model to read printed text, by two terms. First, attention: in the layers `guided`,
        the first head learns to attend to the image patch with the character that comes next in the answer. Second,
        position: from the output of the middle layer of `guided`, a linear layer predicts in which cell of the patch
        the character is. Without L_guide, the model learns the form of the answers long before it learns to read.

    units: the tokens, ordered by id. options: fields of `VlmOptions`.
    """

    def __init__(self, units: list[str], shape: Shape | None = None, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["shape"])
        self.options = VlmOptions(**options)
        self.shape = shape or Shape()
        keep_options(self, self.options)
        self.hparams["shape"] = asdict(self.shape)
        middle = sorted({self.shape.layers * third // 6 for third in (2, 3, 4)})
        self.guided: Sequence[int] = middle if self.options.guided is None else self.options.guided
        self.hparams["guided"] = self.guided
        if not all(0 <= number < self.shape.layers for number in self.guided):
            raise InputError(
                f"`guided` must be numbers of layers from 0 to {self.shape.layers - 1}, but is {list(self.guided)}. "
                "Choose others, or none: guided=[]."
            )
        self.model = build_model(self.shape, units, self.options.seed)
        self.cells = CellHeads(self.shape.vision_width, CELLS, tuple(self.options.cell_kinds))
        self.whitening = Whitening(self.shape.vision_width, self.shape.width)
        self.model.model.multi_modal_projector.linear_1.requires_grad_(False)  # its weights are set by `Whitening.fold`
        self.pointer = nn.Linear(self.shape.width, CELLS)
        kinds = [PRINTED.find(unit.strip("Ġ")) + 1 if len(unit.strip("Ġ")) == 1 else 0 for unit in units]
        # (tokens,) each token's index in PRINTED, from 1; 0: the token is not one of these printed characters
        self.register_buffer("printed", torch.tensor(kinds), persistent=False)
        self.printed: Tensor
        self.tokens = {name: units.index(name) for name in (BEGIN, END, IMAGE, PAD)}
        if self.options.start is not None:
            self.begin_from(self.options.start)
        self.rate = Schedule("trapezoid", 1, self.options.decay_from, self.options.decay_steps)
        compiled = self.options.compiled
        self._layers = (torch.compile(vision_layer), torch.compile(language_layer)) if compiled else (None, None)
        half = self.options.half
        fast = fast_bfloat16(torch.device("cpu")) if half is None else half
        self._products = torch.bfloat16 if fast else torch.float32
        self._counts: dict[str, list[float]] = {}

    def begin_from(self, start: str) -> None:
        """Load the weights to begin from. With the option `fresh_projector`, the projector is not loaded.

        start: the folder of an exported model, or a training checkpoint, which also has the auxiliary heads. Raises:
            InputError if the sizes differ.
        """
        part: nn.Module = self if Path(start).is_file() else self.model
        if part is self:
            weights = read_checkpoint(Path(start))["state_dict"]
        else:
            weights = dict(type(self.model).from_pretrained(start, dtype=torch.float32).state_dict())
        if self.options.fresh_projector:
            weights |= {name: value for name, value in part.state_dict().items() if "multi_modal_projector" in name}
        try:
            part.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"`start` must fit, but the model of '{start}' does not ({one_line(error)})") from None

    def factor(self, step: int) -> float:
        """Return the factor that multiplies the learning rate `lr` at a step. Each phase begins with a warm-up; at the
        end of training the factor falls to 0."""
        vision = self.options.vision_steps
        since = step if step < vision else step - vision
        rise = min(1.0, (since + 1) / max(self.options.warmup, 1))
        scale = self.options.vision_lr / self.options.lr if step < vision else 1.0
        return rise * scale * self.rate(step)

    def losses(self, batch: Batch, vision_only: bool) -> dict[str, Tensor]:
        """Compute the losses of a batch. vision_only: train the encoder alone, with L_cells.

        Returns: the scalar to minimise under "loss"; its parts under "cells", "answers", "guide" and "pointer"; and
            accuracies, whose names end in "right".
        """
        states = see(self.model, batch.pixels.float() / 127.5 - 1, self._products, self._layers[0])
        parts: dict[str, Tensor] = {}
        total: Tensor = states.sum() * 0
        for index, (name, scores) in enumerate(zip(("shown", "colours"), self.cells(states), strict=True)):
            labels = batch.cells[..., index]
            total = total + cell_loss(scores, labels, self.options.empty)
            full = labels != 0
            parts[f"{name}_right"] = (scores.argmax(-1) == labels)[full].float().mean()
        parts["cells"] = total
        if vision_only:
            return parts | {"loss": total}
        embeddings = self.model.get_input_embeddings()(batch.tokens)
        seen = self.project(states)
        embeddings = embeddings.masked_scatter((batch.tokens == self.tokens[IMAGE])[..., None], seen)
        mask = turn_mask(batch.turns)
        guided = tuple(self.guided) if self.options.guide_weight else ()
        middle = guided[len(guided) // 2] if guided else -1
        hidden, looks, inside = speak(
            self.model, embeddings, mask, batch.positions, self._products, self._layers[1], guided, middle
        )
        asked = batch.labels != IGNORED
        logits = self.model.lm_head(hidden[asked]).float()
        weights = turn_weights(batch.turns, asked, self.options.length_power)
        answers = F.cross_entropy(logits, batch.labels[asked], reduction="none") @ weights
        parts["answers"] = answers / weights.sum() * token_weight(weights.sum())
        parts["right"] = (logits.argmax(-1) == batch.labels[asked]).float().mean()
        loss = parts["answers"] + self.options.cell_weight * total
        if guided:
            assert inside is not None
            parts["guide"] = self.guide_loss(looks, batch)
            parts["pointer"], parts["pointed_right"] = self.pointer_loss(inside, batch)
            loss = loss + self.options.guide_weight * (parts["guide"] + parts["pointer"])
        read = batch.patches[asked] != NOWHERE
        right = logits.argmax(-1) == batch.labels[asked]
        parts["read_right"] = right[read].float().mean()
        return parts | {"loss": loss}

    def project(self, states: Tensor) -> Tensor:
        """Project the encoder's states (B, P, width) of P patches to input embeddings (B, P, H) of the language model.
        The first call also computes the whitening from these states."""
        projector = self.model.model.multi_modal_projector
        if not self.whitening.measured:
            goes_on = self.options.start is not None and not self.options.fresh_projector
            self.whitening.measure(states, projector.linear_1 if goes_on else None)
        return projector.linear_2(projector.act(self.whitening(states)))

    def on_train_batch_end(self, outputs: object, batch: Batch, batch_idx: int) -> None:
        if self.whitening.measured:
            self.whitening.fold(self.model.model.multi_modal_projector.linear_1)

    def guide_loss(self, looks: list[Tensor], batch: Batch) -> Tensor:
        """Return the attention loss: -log of a head's attention weight on the patch that shows the next printed
        character, averaged over the guided heads and all such characters.

        looks: attention weights (B, L, L) of the guided head of each layer.
        """
        row, query = (batch.patches != NOWHERE).nonzero(as_tuple=True)
        first = (batch.tokens[0] == self.tokens[IMAGE]).long().argmax()
        at = first + batch.patches[row, query].long()
        shares = torch.stack([look[row, query, at] for look in looks])
        weight = token_weight(torch.tensor(len(row), device=row.device))
        return -shares.clamp_min(1e-6).log().mean() * weight if len(row) else shares.sum()

    def pointer_loss(self, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of finding the next printed character. For each answer token that is printed in the picture,
        a linear layer predicts in which cell of an image patch it stands. Returns: the cross-entropy and the accuracy,
        scalars.

        A patch holds two or three letters, so knowing the patch is not enough to tell which letter comes next. states:
        (B, L, H), the output of the middle layer of `guided`.
        """
        row, query = (batch.patches != NOWHERE).nonzero(as_tuple=True)
        kinds = self.printed[batch.labels[row, query]]
        shown = batch.cells[row, batch.patches[row, query].long(), :, 0].long() == kinds[:, None]  # (tokens, cells)
        # False if a patch shows the character twice: then it is not clear which cell is right
        clear = (kinds > 0) & (shown.sum(-1) == 1)
        scores = self.pointer(F.rms_norm(states[row, query], (states.shape[-1],))).float()
        right = scores.argmax(-1) == shown.long().argmax(-1)
        losses = F.cross_entropy(scores, shown.long().argmax(-1), reduction="none") * clear
        mean = losses.sum() / clear.sum().clamp_min(1)
        return mean * token_weight(clear.sum()), right[clear].float().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        parts = self.losses(batch, self.global_step < self.options.vision_steps)
        for name, value in parts.items():
            # accuracies are not averaged over processes: a batch without printed text gives NaN
            accuracy = name.endswith("right")
            self.log(f"train/{name}", value.detach(), batch_size=len(batch.tokens), sync_dist=not accuracy)
        return parts["loss"]

    def on_validation_epoch_start(self) -> None:
        self._counts = defaultdict(lambda: [0.0, 0.0])

    def validation_step(self, batch: Asked, batch_idx: int) -> None:
        """Answer a batch of validation questions greedily, and count the right answers. In the first phase, which
        trains the encoder alone, this does nothing."""
        if self.global_step < self.options.vision_steps and not self.trainer.sanity_checking:
            return
        for question, answer in zip(batch.questions, self.answer(batch), strict=True):
            count = self._counts[question.task]
            if question.task == "describe":
                count[0] += claims_held(answer, question.claims)
                count[1] += len(question.claims)
            else:
                count[0] += right_answer(answer, question.reference, question.expected, question.task)
                count[1] += 1

    def answer(self, batch: Asked) -> list[str]:
        """Return the text of the model's greedy answer to each question."""
        longest = LONGEST[any(question.task == "describe" for question in batch.questions)]
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=longest,
            bos_token_id=self.tokens[BEGIN],
            eos_token_id=self.tokens[END],
            pad_token_id=self.tokens[PAD],
        )
        with torch.no_grad():
            generated: Any = self.model.generate(  # type: ignore[attr-defined, misc] # pyright does not bind its protocol
                input_ids=batch.tokens,
                attention_mask=batch.mask,
                pixel_values=batch.pixels.float() / 127.5 - 1,
                generation_config=settings,
            )
        units: list[str] = self.hparams["units"]
        return [spelled(units, row, self.tokens[END]) for row in generated[:, batch.tokens.shape[1] :].tolist()]

    def on_validation_epoch_end(self) -> None:
        counts = torch.tensor([self._counts.get(task, [0.0, 0.0]) for task in TASKS], dtype=torch.float64)
        gathered = self.all_gather(counts)
        counts = gathered.reshape(-1, *counts.shape).sum(0)  # type: ignore[union-attr] # a tensor of a tensor
        asked = counts[:, 1] > 0
        if not bool(asked.any()):
            return
        for task, (right, of) in zip(TASKS, counts.tolist(), strict=True):
            if of:
                self.log(f"dev/{task}", right / of, rank_zero_only=True)
        self.log("dev/mean", float((counts[asked, 0] / counts[asked, 1]).mean()), rank_zero_only=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        inner = {
            id(module.weight)
            for part in (self.model.model.vision_tower.encoder, self.model.model.language_model.layers, self.whitening)
            for module in part.modules()
            if isinstance(module, nn.Linear)
        }
        inner.add(id(self.model.model.multi_modal_projector.linear_2.weight))
        named, options = self.named_parameters(), self.options
        optimizer = MuonAdamW.of(named, lambda _, weight: id(weight) in inner, options.lr, options.weight_decay)
        return scheduled(optimizer, self.factor)


def turn_weights(turns: Tensor, asked: Tensor, power: float) -> Tensor:
    """Compute the loss weight of each of the N answer tokens: n ** -power, where n is the number of tokens of its
    answer. Returns (N,).

    turns: (B, L), the index of the question that each token belongs to. asked: (B, L) bool, True at the N positions
        that predict an answer token.
    """
    rows, columns = asked.nonzero(as_tuple=True)
    names = rows * (int(turns.max()) + 1) + turns[rows, columns]
    _, which, counts = torch.unique(names, return_inverse=True, return_counts=True)
    return counts[which].float() ** -power


def spelled(units: list[str], tokens: list[int], end: int) -> str:
    """Convert an answer's token ids to text, up to the token `end`. units: the byte-level spelling of each token. The
    text is correct only if it is ASCII, as for the synthetic pictures."""
    if end in tokens:
        tokens = tokens[: tokens.index(end)]
    return "".join(units[token] for token in tokens).replace("Ġ", " ").replace("Ċ", "\n").strip()
