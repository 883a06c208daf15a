"""Says how far a picture is from those that a vision-language model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from mmdec.checks.weights import read_weights, weight_file
from mmdec.errors import InputError

FAMILIAR_FILE = "confidence.safetensors"
MEANS, WHITENING = "means", "whitening"


@final
@dataclass(frozen=True)
class FamiliarPictures:
    """Measures how far an image is from the model's training images, in the states of the model's own vision encoder.

    Each kind of training image has a mean, and all kinds share one covariance. The distance of an image is the
    Mahalanobis distance to the nearest mean. For an encoder that was trained on synthetic pictures only, photographs,
    charts and drawings by people are far away.

    References:
        Lee et al., "A simple unified framework for detecting out-of-distribution samples and adversarial attacks",
        2018. Here on one layer, with mean and standard deviation of its states.
    """

    means: Tensor  # (K, F), mean of each of K kinds of images, in F features
    whitening: Tensor  # (F, F), the whitening matrix: multiplied by it, the images of one kind have unit covariance

    def distance(self, summaries: Tensor) -> Tensor:
        """Return each image's distance to the nearest kind of training images.

        Args:
            summaries: (N, F), features of the images.

        Returns:
            (N,) float32 on the CPU.
        """
        apart = summaries.float().cpu()[:, None] - self.means
        return (apart @ self.whitening).norm(dim=2).amin(1)


def read_familiar(folder: Path) -> FamiliarPictures | None:
    """Read the statistics of the training images from a model's folder; None if there are none.

    Raises:
        InputError: If the file is damaged.
    """
    if not (folder / FAMILIAR_FILE).is_file():
        return None
    tensors = read_weights([weight_file(folder, FAMILIAR_FILE)])
    means, whitening = tensors.get(MEANS), tensors.get(WHITENING)
    if means is None or whitening is None or means.dim() != 2 or whitening.shape != (means.shape[1], means.shape[1]):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise InputError(
            f"`model` must have a {FAMILIAR_FILE} with {MEANS!r} (K, F) and {WHITENING!r} (F, F), or none, but that in "
            f"'{folder}' has {shapes}. Download it again, or delete it."
        )
    return FamiliarPictures(means.float(), whitening.float())
