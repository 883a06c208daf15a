"""The images and videos of a prompt: encoded once for a run, and assigned to the placeholders in its token ids.

The vision tower runs in `generate` before it hands over, or here if `generate` was given no pixels. In both cases the
run keeps the outputs, and later passes do not run the tower again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmdec.decode.watch import Watch
from mmdec.types import InputError

KINDS = ("image", "video")
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
# sizes in pixels of each image or video, or the size of its patch grid
SIZES = ("image_sizes", "image_grid_thw", "video_grid_thw")
NAMES = (*PIXELS.values(), *SIZES, "second_per_grid_ts", "mm_token_type_ids", "mm_encoder_outputs")


@dataclass(frozen=True)
class Encoded:
    """The vision tower's output for T visual tokens: all images of the batch, or all videos."""

    features: Tensor  # (T, H), projected
    lengths: list[int]  # visual tokens of each image
    deep: list[Tensor] = field(default_factory=list)  # DeepStack: (T, H) for each of the first layers
    summaries: Tensor | None = None  # (images, 2V): the tower's last states, mean and deviation over an image's patches

    @classmethod
    def of(cls, output: Any) -> Encoded:
        parts = list(output.pooler_output)
        deep = output.get("deepstack_features") or ()
        lengths = [len(part) for part in parts]
        return cls(
            torch.cat(parts), lengths, [torch.cat(list(layer)) for layer in deep], _summaries(output, len(parts))
        )

    def pick(self, tokens: Tensor) -> Encoded:
        """The features of these visual tokens (T',) int64."""
        return Encoded(self.features[tokens], [len(tokens)], [layer[tokens] for layer in self.deep])

    def output(self) -> SimpleNamespace:
        """The features in the format of a model's `mm_encoder_outputs`."""
        return SimpleNamespace(pooler_output=[self.features], deepstack_features=[[layer] for layer in self.deep])


@dataclass
class VisionInputs:
    """The images and videos of a run. `encoded` is filled by the first pass that needs it."""

    inputs: Mapping[str, Any]  # the inputs in NAMES that are not None
    rows: int  # number of prompts; the batch has more rows if each has several sequences
    encoded: dict[str, Encoded] | None = None
    # positions (3, B, F) of the prompt and offsets (3, B), once computed
    positions: tuple[Tensor, Tensor] | None = None
    seconds: float = 0.0  # time in the vision tower; 0 if `generate` ran it

    @classmethod
    def of(cls, inputs: Mapping[str, Any], rows: int) -> VisionInputs:
        """Take the images from a processor's output or from `generate`'s inputs. rows: of token ids.

        Raises: InputError if the pixels are malformed.
        """
        tensors = {name: inputs[name] for name in NAMES if inputs.get(name) is not None}
        for name in (*PIXELS.values(), *SIZES, "mm_token_type_ids"):
            value = tensors.get(name)
            if value is not None and not isinstance(value, Tensor):
                raise InputError(
                    f"`{name}` must be a tensor, but is of type {type(value).__name__}. Pass the output of the model's "
                    "own processor."
                )
        for kind, name in PIXELS.items():
            pixels = tensors.get(name)
            if pixels is not None and not (pixels.is_floating_point() and bool(pixels.isfinite().all())):
                raise InputError(
                    f"`{name}` must hold finite floating-point numbers, but holds {_bad(pixels)}. Pass {kind}s through "
                    "the model's own processor."
                )
        return cls(tensors, rows)

    @property
    def raw(self) -> Mapping[str, Any] | None:
        """The inputs for another model; None if `generate` did not pass the pixels on."""
        return None if "mm_encoder_outputs" in self.inputs else self.inputs

    def encode(self, model: Any) -> dict[str, Encoded]:
        """The features of all images and videos, by kind. The tower runs once for a run. model: without its LM head."""
        if self.encoded is None:
            watch = Watch(model.device)
            outputs = self.inputs.get("mm_encoder_outputs") or {}
            self.encoded = {kind: Encoded.of(outputs[kind]) for kind in KINDS if outputs.get(kind) is not None}
            for kind in KINDS:
                if PIXELS[kind] in self.inputs:
                    self.encoded[kind] = Encoded.of(self._tower(model, kind))
                    watch.lap("target")
            self.seconds += watch.seconds["target"]
        return self.encoded

    def _tower(self, model: Any, kind: str) -> Any:
        sizes = {name: value for name, value in self.inputs.items() if name in SIZES}
        call = model.get_image_features
        if kind == "video":
            if "video" not in model.input_modalities:
                raise InputError(
                    f"`pixel_values_videos` must be left out for {type(model).__name__}, which reads images. Pass a "
                    "video's frames as images."
                )
            call = model.get_video_features
        names = ("video_grid_thw",) if kind == "video" else ("image_sizes", "image_grid_thw")
        kind_sizes = {name: value for name, value in sizes.items() if name in names}
        try:
            return call(self.inputs[PIXELS[kind]], **kind_sizes, return_dict=True)
        except (InputError, MemoryError, torch.OutOfMemoryError):
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            shapes = {
                name: tuple(value.shape) for name, value in (("pixels", self.inputs[PIXELS[kind]]), *kind_sizes.items())
            }
            raise InputError(
                f"`{PIXELS[kind]}` must be as {type(model).__name__} reads it, but is {shapes}: "
                f"{str(error)[:200] or type(error).__name__}. Pass the output of the model's own processor."
            ) from error

    def deal(self, model: Any, kind: str, ids: Tensor, fresh: int) -> tuple[Encoded | None, Tensor]:
        """The features of the placeholders in the last `fresh` columns of ids (B, P), and their places (B, fresh) bool.

        The features may cover all placeholders, or only these. Raises: InputError if their number fits neither.
        """
        token = int(getattr(model.config, f"{kind}_token_id", -1))
        holders = ids == token
        fresh_holders = holders[:, -fresh:]
        encoded = self.encode(model).get(kind)
        copies = len(ids) // self.rows
        count = 0 if encoded is None else len(encoded.features)
        for holder_mask in (holders[::copies], fresh_holders[::copies]):
            if encoded is not None and count == int(holder_mask.sum()) and _uncut(holder_mask, encoded.lengths):
                indices = holder_mask.flatten().cumsum(0).view(holder_mask.shape) - 1
                tokens = indices.repeat_interleave(copies, 0)[:, -fresh:][fresh_holders]
                if not len(tokens):
                    return None, fresh_holders
                return encoded if len(tokens) == count and copies == 1 else encoded.pick(tokens), fresh_holders
        if encoded is None and not bool(fresh_holders.any()):
            return None, fresh_holders
        images = 0 if encoded is None else len(encoded.lengths)
        rows = fresh_holders[::copies].sum(1).tolist()
        raise InputError(
            f"`input_ids` must hold one placeholder (token {token}) for each visual token of the {kind}s in its row, "
            f"but holds {rows[0] if len(rows) == 1 else rows} for {count} visual tokens of {images} {kind}"
            f"{'s' * (images != 1)}. Name as many {kind}s in the text as you pass, and use the model's own processor."
        )


def _uncut(holders: Tensor, lengths: list[int]) -> bool:
    """Whether each image lies within one row of placeholders (B, P)."""
    return set(accumulate(holders.sum(1).tolist())) <= {0, *accumulate(lengths)}


def _summaries(output: Any, images: int) -> Tensor | None:
    """Where the tower's states are (images, patches, V), as in LLaVA 1.5: an image has its own there."""
    states = output.get("last_hidden_state")
    if states is None or states.dim() != 3 or len(states) != images:
        return None
    return torch.cat([states.mean(1), states.std(1, unbiased=False)], 1)


def _bad(pixels: Tensor) -> str:
    return str(pixels.dtype) if not pixels.is_floating_point() else "some that are not finite"
