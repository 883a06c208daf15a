"""Two optimizers stepped as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """Muon (Jordan et al. 2024) for a network's inner matrices, AdamW for everything else.

    matrices: parameters of two dimensions. others: groups as AdamW takes them. Muon's steps are scaled to the size of
    AdamW's (Liu et al. 2025, section 2.2), so that both take one learning rate.
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.muon.step()
        self.adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]
