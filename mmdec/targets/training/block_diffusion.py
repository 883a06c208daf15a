"""Training of a small masked diffusion model, from an autoregressive one or from random weights.

Each block of a text gets a share of masks, drawn from 0 to 1. The model predicts the hidden tokens from the rest of the
block and, for a block-causal model, from the clean blocks before. All blocks are trained in one pass over the clean
text and, after it, its masked copy (Arriola et al. 2025, arXiv 2503.09573, section 4). The loss is the mean
cross-entropy of the hidden tokens.

In shapes: B texts, N tokens of a text, A tokens after the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mmdec.checks.arguments import check_choice
from mmdec.errors import InputError
from mmdec.hub.publish import atomic_folder, write_provenance
from mmdec.targets.masked_diffusion import CanvasLayout, Visibility, additive, check_canvas_model
from mmdec.training.checkpoints import check_positive
from mmdec.training.module import RecipeModule
from mmdec.training.optim import groups

MASK = "<mask>"  # name of the mask token among the data module's units
LIST_TASKS = ("copy", "reverse", "sort", "shuffle")
SPECIAL_UNITS = ("<end>", MASK, "=", *LIST_TASKS)
TRAIN_SEED, DEV_SEED = 1, 2  # first numbers of the seeds of batches


@dataclass
class CanvasBatch:
    """Texts of one length with prompts of one length. After the prompt come whole blocks."""

    tokens: Tensor  # (B, N) int64
    prompt: int


@dataclass(frozen=True)
class DiffusionOptions:
    """Options of `BlockDiffusionModule` that a recipe (YAML file) sets.

    Args:
        start: Folder of the autoregressive model to begin with; null: a Qwen3 of random weights and these `sizes`.
        sizes: Fields of `Qwen3Config`.
        visible: "block": tokens see their own and earlier blocks; "full": everything.
        warmup, decay_from, decay_steps: In training steps; see `Schedule`.
    """

    start: str | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    visible: Visibility = "block"
    block_length: int = 8
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 50
    decay_from: int | None = None
    decay_steps: int = 500
    seed: int = 0


@final
class BlockDiffusionModule(RecipeModule):
    """Trains a masked diffusion model, and saves it as `model` in the recipe's `default_root_dir`.

    Args:
        units: The tokens by id; one of them is "<mask>".
        options: Fields of `DiffusionOptions`.
    """

    options: DiffusionOptions

    def __init__(self, units: list[str], **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.use_options(DiffusionOptions(**options))
        check_choice("visible", self.options.visible, ("block", "full"))
        check_positive(block_length=self.options.block_length)
        torch.manual_seed(self.options.seed)
        if self.options.start is None:
            self.model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(units), **self.options.sizes))
        else:
            self.model = AutoModelForCausalLM.from_pretrained(self.options.start, dtype=torch.float32)
            self.model.resize_token_embeddings(len(units), mean_resizing=False)
        check_canvas_model(self.model.train())
        self.layout = CanvasLayout(self.options.visible, self.options.block_length, units.index(MASK))
        config: Any = self.model.config
        config.mask_token_id, config.block_length = self.layout.mask_token, self.layout.block_length

    def optimizer(self) -> Optimizer:
        options = self.options
        return AdamW(groups(self.parameters(), options.weight_decay), options.lr, betas=(0.9, 0.98))

    def loss(self, batch: CanvasBatch, draws: torch.Generator | None = None) -> Tensor:
        """Mask each block at random and return the mean cross-entropy of the hidden tokens.

        Args:
            draws: Where the masks come from; None: torch's own generator.
        """
        answer = batch.tokens[:, batch.prompt :]
        blocks = answer.unflatten(1, (-1, self.layout.block_length)).shape
        share = torch.rand((*blocks[:2], 1), generator=draws)
        hidden = (torch.rand(blocks, generator=draws) < share).flatten(1).to(answer.device)
        logits = self.predict(batch, answer.masked_fill(hidden, self.layout.mask_token))
        return cross_entropy(logits[hidden].float(), answer[hidden])

    def predict(self, batch: CanvasBatch, noisy: Tensor) -> Tensor:
        """Return the logits (B, A, V) for the tokens after the prompt, of which some are masked in `noisy` (B, A)."""
        tokens, prompt, layout = batch.tokens, batch.prompt, self.layout
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if layout.visible == "full":
            ids, kept = torch.cat([tokens[:, :prompt], noisy], 1), positions[prompt:]
            visible = torch.ones(len(positions), len(positions), dtype=torch.bool, device=tokens.device)
        else:
            ids = torch.cat([tokens, noisy], 1)
            kept = torch.arange(len(positions), ids.shape[1], device=tokens.device)
            copies = torch.arange(ids.shape[1], device=tokens.device) >= len(positions)
            positions = torch.cat([positions, positions[prompt:]])
            blocks = layout.blocks(positions, prompt)
            # a copy sees clean blocks before its own, and its own block of the copy; clean text sees no copy
            limit = blocks[:, None] - copies[:, None].long()
            visible = torch.where(copies, copies[:, None] & (blocks == blocks[:, None]), blocks <= limit)
        return cast(Any, self.model)(
            input_ids=ids,
            attention_mask=additive(visible, self.model.dtype).expand(len(ids), 1, -1, -1),
            position_ids=positions[None].expand(len(ids), -1),
            use_cache=False,
            logits_to_keep=kept,
        ).logits

    def training_step(self, batch: CanvasBatch, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: CanvasBatch, number: int) -> None:
        draws = torch.Generator().manual_seed(number)
        self.log("dev/loss", self.loss(batch, draws), batch_size=len(batch.tokens), sync_dist=True)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            with atomic_folder(Path(self.trainer.default_root_dir) / "model") as folder:
                self.model.save_pretrained(folder)
                options = {name: value for name, value in self.hparams.items() if name != "units"}
                write_provenance(folder, {"step": self.global_step, "hyperparameters": options}, self.device)


class _Batches(Dataset[CanvasBatch]):
    """Batches that are made when they are read, from the seed (part, epoch, number)."""

    def __init__(self, data: _CanvasData, part: int, epoch: int, count: int) -> None:
        self.data, self.part, self.epoch, self.count = data, part, epoch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> CanvasBatch:
        seed = (self.part * 1_000_003 + self.epoch) * 1_000_003 + number
        return self.data.batch(torch.Generator().manual_seed(seed), self.part == DEV_SEED)


class _CanvasData(LightningDataModule, ABC):
    """What both data modules share: batches of a seed. `units` are the tokens by id."""

    units: list[str]

    def __init__(self, block_length: int, batch_size: int, steps_per_epoch: int, dev_batches: int) -> None:
        super().__init__()
        check_positive(
            block_length=block_length, batch_size=batch_size, steps_per_epoch=steps_per_epoch, dev_batches=dev_batches
        )
        self.block_length, self.batch_size = block_length, batch_size
        self.steps_per_epoch, self.dev_batches = steps_per_epoch, dev_batches

    @abstractmethod
    def batch(self, draws: torch.Generator, dev: bool) -> CanvasBatch:
        """Draw a batch."""

    def _loader(self, part: int, epoch: int, count: int) -> DataLoader[CanvasBatch]:
        return DataLoader(_Batches(self, part, epoch, count), batch_size=None)

    def train_dataloader(self) -> DataLoader[CanvasBatch]:
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        return self._loader(TRAIN_SEED, epoch, self.steps_per_epoch)

    def val_dataloader(self) -> DataLoader[CanvasBatch]:
        return self._loader(DEV_SEED, 0, self.dev_batches)


@final
class ListTasks(_CanvasData):
    """Lists of different items to copy, reverse, sort or shuffle, as ParallelBench has them (arXiv 2510.04767).

    A prompt is a task, a list and "="; the answer is the list, and end tokens to the end of a block. Any order but
    the list's own is a right answer to "shuffle".

    Args:
        items: Number of different items.
        shortest, longest: Lengths of lists.
    """

    def __init__(
        self,
        items: int = 26,
        shortest: int = 4,
        longest: int = 12,
        block_length: int = 8,
        batch_size: int = 64,
        steps_per_epoch: int = 100,
        dev_batches: int = 8,
    ) -> None:
        super().__init__(block_length, batch_size, steps_per_epoch, dev_batches)
        check_positive(items=items, shortest=shortest, longest=longest)
        if not 2 <= shortest <= longest <= items:
            raise InputError(
                f"`shortest` and `longest` must be from 2 to the {items} items, but are {shortest} and {longest}. "
                "Change them."
            )
        self.items, self.shortest, self.longest = items, shortest, longest
        self.units = [*SPECIAL_UNITS, *(f"item {number}" for number in range(items))]

    def batch(self, draws: torch.Generator, dev: bool) -> CanvasBatch:
        length = int(torch.randint(self.shortest, self.longest + 1, (), generator=draws))
        tasks = torch.randint(len(LIST_TASKS), (self.batch_size,), generator=draws)
        return self.questions(length, tasks, draws)

    def questions(self, length: int, tasks: Tensor, draws: torch.Generator) -> CanvasBatch:
        """Draw a list of this length for each task (B,), an index of `LIST_TASKS`. The tokens hold the answers."""
        first = len(SPECIAL_UNITS)
        lists = torch.rand(len(tasks), self.items, generator=draws).argsort(1)[:, :length] + first
        shuffled = lists.gather(1, torch.rand(lists.shape, generator=draws).argsort(1))
        choices = torch.stack([lists, lists.flip(1), lists.sort(1).values, shuffled])
        answers = choices[tasks, torch.arange(len(tasks))]
        blocks = length // self.block_length + 1
        ends = answers.new_full((len(tasks), blocks * self.block_length - length), SPECIAL_UNITS.index("<end>"))
        task_tokens = tasks[:, None] + SPECIAL_UNITS.index(LIST_TASKS[0])
        equals = torch.full_like(task_tokens, SPECIAL_UNITS.index("="))
        return CanvasBatch(torch.cat([task_tokens, lists, equals, answers, ends], 1), length + 2)


@final
class OwnTexts(_CanvasData):
    """Texts that an autoregressive model itself samples, so that no corpus is needed.

    Args:
        model: Folder of the model. The mask token is added after its vocabulary.
        texts: Number of texts; a tenth is for validation.
        length: Tokens of a text.
    """

    def __init__(
        self,
        model: str,
        texts: int = 2000,
        length: int = 128,
        block_length: int = 8,
        batch_size: int = 32,
        steps_per_epoch: int = 50,
        dev_batches: int = 4,
    ) -> None:
        super().__init__(block_length, batch_size, steps_per_epoch, dev_batches)
        check_positive(texts=texts, length=length)
        self.writer: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.units = [*(str(number) for number in range(self.writer.config.vocab_size)), MASK]
        self.texts, self.length = texts, length
        self.written: Tensor | None = None

    def setup(self, stage: str | None = None) -> None:
        if self.written is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.written = torch.cat([self._write(256) for _ in range(0, self.texts, 256)])[: self.texts]

    def _write(self, count: int) -> Tensor:
        config: Any = self.writer.config
        begin, more = torch.full((count, 1), int(config.bos_token_id)), self.length - 1
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": more}
        mask = torch.ones_like(begin)
        text = self.writer.generate(begin, attention_mask=mask, pad_token_id=config.eos_token_id, **options)
        return torch.nn.functional.pad(text, (0, self.length - text.shape[1]), value=config.eos_token_id)

    def batch(self, draws: torch.Generator, dev: bool) -> CanvasBatch:
        texts, edge = cast(Tensor, self.written), self.texts // 10
        rows = texts[:edge] if dev else texts[edge:]
        tokens = rows[torch.randint(len(rows), (self.batch_size,), generator=draws)]
        prompt = 1 + int(torch.randint(self.block_length, (), generator=draws))  # blocks may begin anywhere
        blocks = (self.length - prompt) // self.block_length
        return CanvasBatch(tokens[:, : prompt + blocks * self.block_length], prompt)
