"""Optimizers, learning-rate schedules, and data-parallel training.

Each process trains on a part of every batch. DDP and FSDP average the processes' gradients. `token_weight` corrects
this average: every token gets the same weight, as if one process had computed the whole batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mmdec.checks.devices import has_fast_bfloat16


def groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups for AdamW: only tensors of two or more dimensions get weight decay."""
    several = [parameter for parameter in parameters if parameter.requires_grad]
    return [
        {"params": [p for p in several if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in several if p.dim() <= 1], "weight_decay": 0.0},
    ]


def seed_step(seed: int, epoch: int, step: int, rank: int = 0) -> None:
    """Seed torch's generators for one training step.

    A resumed training then draws the same random numbers as an uninterrupted training.

    Args:
        step: Number of the step within the epoch.
        rank: Number of the process; each process draws different numbers.
    """
    torch.manual_seed((rank << 48) + (seed * 100_003 + epoch) * 1_000_003 + step)


def with_schedule(optimizer: Optimizer, rate: Callable[[int], float]) -> OptimizerLRScheduler:
    """Return an optimizer with its learning-rate schedule, as Lightning's `configure_optimizers` must return it.

    Args:
        rate: Maps the number of an optimizer step to the factor on the learning rate. It must be a function, not a
            callable object: torch would store the object's attributes in checkpoints and restore them, so a resumed
            training could not change its schedule.
    """
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, rate), "interval": "step"}}


class MuonAdamW(Optimizer):
    """Optimizer: Muon (Jordan et al. 2024) for a network's inner weight matrices, AdamW for all other parameters.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, section 2.2), so that one learning rate suits
    both optimizers. State: the two optimizers.

    Args:
        matrices: Two-dimensional parameters for Muon.
        others: Parameter groups for AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: list[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
    ) -> None:
        self.muon = Muon(list(matrices), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW(others, lr=lr, betas=betas)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    @classmethod
    def for_parameters(
        cls,
        parameters: Iterable[tuple[str, Tensor]],
        is_inner: Callable[[str, Tensor], bool],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.98),
        extra_groups: Sequence[dict[str, Any]] = (),
    ) -> MuonAdamW:
        """Build the optimizer from a module's named parameters. Frozen parameters are left out.

        Args:
            parameters: (name, weight) of each parameter.
            is_inner: Takes the name of a matrix and the matrix; returns whether Muon trains it. AdamW trains everything
                else.
            extra_groups: Further parameter groups for AdamW, each with its own learning rate.
        """
        trained = [(name, weight) for name, weight in parameters if weight.requires_grad]
        matrices = [weight for name, weight in trained if weight.dim() == 2 and is_inner(name, weight)]
        chosen = set(map(id, matrices))
        others = [weight for _, weight in trained if id(weight) not in chosen]
        return cls(matrices, [*groups(others, weight_decay), *extra_groups], lr, weight_decay, betas)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        self.adamw.step()
        return loss

    @torch.no_grad()
    def _step_matrices(self) -> None:
        """Make Muon's step, for all matrices of one shape at once, in a dtype in which the processor is fast.

        torch's own Muon updates the matrices one by one in bfloat16. On a CPU without AVX-512, bfloat16 is 16 times
        slower than float32.
        """
        for group in self.muon.param_groups:
            orthogonalize = partial(
                orthogonal, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"]
            )
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[weight.shape].append(weight)
            for shape, weights in shapes.items():
                updates = []
                for weight in weights:
                    state, gradient = self.muon.state[weight], weight.grad
                    assert gradient is not None
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(weight)
                    buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer)
                directions = compute_shared(torch.stack(updates), orthogonalize)
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                for weight, direction in zip(weights, directions, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]


def compute_shared(matrices: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to N matrices (N, rows, columns).

    With several processes, each process computes a part of the N matrices, and all processes get the whole result.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return function(matrices)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    size = -(-len(matrices) // world)
    part = torch.zeros(size, *matrices.shape[1:], dtype=matrices.dtype, device=matrices.device)
    mine = matrices[rank * size : (rank + 1) * size]
    if len(mine):
        part[: len(mine)] = function(mine)
    parts = [torch.empty_like(part) for _ in range(world)]
    torch.distributed.all_gather(parts, part)
    return torch.cat(parts)[: len(matrices)]


def orthogonal(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Orthogonalise N matrices (N, rows, columns): their singular values become close to 1.

    It makes `steps` Newton-Schulz steps of fifth degree, X <- a X + (b A + c A^2) X with A = X X^T (Jordan et al.
    2024).

    Args:
        coefficients: (a, b, c).
        eps: The smallest norm by which a matrix is divided at the start.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x.to(torch.bfloat16 if has_fast_bfloat16(matrices.device) else torch.float32)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule. Called with a step, it returns the learning rate as a share of its peak, from 0 to 1.

    With each `kind`, the rate first rises linearly for `warmup` steps. Then "inverse-sqrt" falls as 1/sqrt(step).
    "trapezoid" is constant until step `decay_from`, and then falls linearly to zero within `decay_steps`; if
    `decay_from` is None, it stays constant. "cosine" falls to zero within `decay_steps` after the warm-up.
    """

    kind: Literal["inverse-sqrt", "trapezoid", "cosine"] = "inverse-sqrt"
    warmup: int = 10_000
    decay_from: int | None = None
    decay_steps: int = 1000

    def __call__(self, step: int) -> float:
        rise = min(1.0, (step + 1) / max(self.warmup, 1))
        if self.kind == "inverse-sqrt":
            return rise * min(1.0, (max(self.warmup, 1) / (step + 1)) ** 0.5)
        if self.kind == "cosine":
            part = min(1.0, max(step - self.warmup, 0) / max(self.decay_steps, 1))
            return rise * 0.5 * (1 + math.cos(math.pi * part))
        if self.decay_from is None or step < self.decay_from:
            return rise
        return rise * max(0.0, 1.0 - (step - self.decay_from) / max(self.decay_steps, 1))

    def ending_at(self, step: int, end: int) -> Schedule:
        """Return a schedule that has the same value at `step` and falls linearly to zero at step `end`.

        This schedule must be a trapezoid.

        Returns:
            This schedule unchanged if it is zero at `step`, or if `end` is not after `step`.
        """
        flat = self.decay_from is None or step <= self.decay_from
        height = 1.0 if flat else max(0.0, 1.0 - (step - (self.decay_from or 0)) / max(self.decay_steps, 1))
        if height == 0.0 or end <= step:
            return self
        # number of steps of a whole fall from 1 to 0; if `height` is below 1, the fall began before `step`
        steps = round((end - step) / height)
        return replace(self, kind="trapezoid", decay_from=end - steps, decay_steps=steps)


T = TypeVar("T")


def rows_of(batches: Sequence[Sequence[T]], rank: int, world: int) -> list[list[T]]:
    """Return the part of each batch that process `rank` of `world` trains on: every `world`-th row.

    Batches with fewer rows than processes are left out in all processes.
    """
    return [list(batch[rank::world]) for batch in batches if len(batch) >= world]


def batches_by_size(order: Iterable[int], sizes: Sequence[int], max_size: int) -> list[list[int]]:
    """Group items, in their order, into batches of limited size.

    The size of a batch is that of its largest item times its number of items, as with padding.

    Args:
        sizes: Size of each item, by the item's index.
        max_size: The largest size of a batch. A larger item forms a batch of its own.
    """
    batches: list[list[int]] = [[]]
    largest = 0
    for item in order:
        largest = max(largest, sizes[item])
        if batches[-1] and largest * (len(batches[-1]) + 1) > max_size:
            batches.append([])
            largest = sizes[item]
        batches[-1].append(item)
    return batches


def token_weight(count: Tensor) -> Tensor:
    """Return the factor for this process's mean loss over `count` tokens.

    With it, the average of all processes is the mean over all tokens. It is `count` / (mean count of all processes).

    Args:
        count: One or several counts, a tensor of the same shape in every process.

    Returns:
        A factor for each count. It is 1 in a single process. It is also 1 if gradients are off, as in validation:
        there, processes may have different numbers of batches, and a process that called this alone would wait forever.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.is_grad_enabled()):
        return torch.ones_like(count, dtype=torch.float32)
    total = count.detach().to(torch.float32, copy=True)
    torch.distributed.all_reduce(total)
    return count * torch.distributed.get_world_size() / total.clamp(min=1)
