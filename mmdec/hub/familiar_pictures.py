"""What the pictures look like that a model was trained on, in its own vision encoder's states.

Each kind of picture is a mean, all kinds share one covariance, and a new picture is as far as the nearest kind is in
that measure. An encoder that was trained on drawn scenes alone puts photographs, charts and other people's drawings far
from them.
Source: Lee et al., "A simple unified framework for detecting out-of-distribution samples and adversarial attacks",
2018, on one layer, with the states' deviation beside their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from safetensors.torch import save
from torch import Tensor

from mmdec.checks.files import write_whole
from mmdec.checks.weights import checked_file, read_weights
from mmdec.types import InputError

FILE = "confidence.safetensors"
MEANS, WHITENING = "means", "whitening"
RIDGE = 0.01  # of the mean variance, added to each: directions without any variance would count beyond measure


@final
@dataclass(frozen=True)
class FamiliarPictures:
    """The kinds' means (K, F) and a matrix (F, F) in whose coordinates the pictures of a kind have unit covariance."""

    means: Tensor
    whitening: Tensor

    @staticmethod
    def of(summaries: Tensor, kinds: Sequence[str]) -> FamiliarPictures:
        """Of pictures (N, F), each of one of `kinds`."""
        names = sorted(set(kinds))
        which = torch.tensor([names.index(kind) for kind in kinds])
        values = summaries.double()
        means = torch.stack([values[which == index].mean(0) for index in range(len(names))])
        covariance = (values - means[which]).T @ (values - means[which]) / len(values)
        covariance += RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
        whitening = torch.linalg.inv(torch.linalg.cholesky(covariance)).T
        return FamiliarPictures(means.float(), whitening.float())

    def distance(self, summaries: Tensor) -> Tensor:
        """(N, F) -> (N,) float32, on the CPU: from each picture to the nearest kind."""
        apart = summaries.float().cpu()[:, None] - self.means
        return (apart @ self.whitening).norm(dim=2).amin(1)

    def write(self, folder: Path) -> Path:
        """Into a model's folder, in half precision, in one step."""
        tensors = {MEANS: self.means.half(), WHITENING: self.whitening.half().contiguous()}
        return write_whole(folder / FILE, save(tensors))


def read_familiar(folder: Path) -> FamiliarPictures | None:
    """Those in a model's folder; None where it has no such file. Raises InputError for a file that is damaged."""
    if not (folder / FILE).is_file():
        return None
    tensors = read_weights([checked_file(folder, FILE)])
    means, whitening = tensors.get(MEANS), tensors.get(WHITENING)
    if means is None or whitening is None or means.dim() != 2 or whitening.shape != (means.shape[1], means.shape[1]):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise InputError(
            f"`model` must have a {FILE} with {MEANS!r} (K, F) and {WHITENING!r} (F, F), or none, but that in "
            f"'{folder}' has {shapes}. Fetch it again, or delete it."
        )
    return FamiliarPictures(means.float(), whitening.float())
