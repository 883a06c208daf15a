"""Samples as the target reads them: its processor's own chat, pictures included, and batches of such inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor

from mmdec.images import read_image, to_pil
from mmdec.training.vlm_drafters.samples import Sample

Inputs = dict[str, Tensor]


class Prompting:
    """A target's processor (or tokenizer, for a language model): what `mmdec.describe` sends for a question."""

    def __init__(self, base: str | Path) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(base)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        self.films = getattr(self.processor, "video_token", None) is not None

    def __call__(self, sample: Sample) -> Inputs:
        """A batch of one. Frames are a video where the processor knows videos, else pictures."""
        if self.tokenizer is self.processor:  # of a language model: it has no pictures
            return self._text(sample.question)
        content: list[dict[str, Any]] = []
        if sample.video and self.films:
            content.append({"type": "video", "video": np.stack([read_image(path) for path in sample.video])})
        else:
            pictures = [to_pil(read_image(path)) for path in (*sample.images, *sample.video)]
            content += [{"type": "image", "image": picture} for picture in pictures]
        content.append({"type": "text", "text": sample.question})
        return dict(
            self.processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        )

    def _text(self, question: str) -> Inputs:
        if not self.tokenizer.chat_template:
            return dict(self.tokenizer(question, return_tensors="pt"))
        messages = [{"role": "user", "content": question}]
        return dict(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        )


def append(inputs: Inputs, tokens: Sequence[int]) -> Inputs:
    """A batch of one, with text tokens after it."""
    ids = inputs["input_ids"]
    added = torch.tensor([list(tokens)], dtype=ids.dtype, device=ids.device)
    fills = {"input_ids": added, "attention_mask": torch.ones_like(added)}
    return {
        name: torch.cat([value, fills.get(name, torch.zeros_like(added)).to(value.dtype)], 1)
        if value.shape == ids.shape
        else value
        for name, value in inputs.items()
    }


def join(rows: Sequence[Inputs], pad: int, left: bool) -> Inputs:
    """Batches of one as one batch, padded on the left (to be continued) or on the right.

    What is as long as the text is padded with it. The rest belongs to pictures and follows one after the other; where
    their numbers of tiles differ (LLaVA-NeXT), these are padded with zeros.
    """
    width = max(row["input_ids"].shape[1] for row in rows)
    joined: Inputs = {}
    for name in {name for row in rows for name in row}:
        parts = []
        for row in rows:
            if name not in row:
                if any(name in other and other[name].shape == other["input_ids"].shape for other in rows):
                    parts.append(torch.zeros(1, width, dtype=torch.long))
                continue
            value = row[name]
            if value.shape == row["input_ids"].shape:
                lacking = width - value.shape[1]
                fill = pad if name == "input_ids" else 0
                value = torch.nn.functional.pad(value, (lacking, 0) if left else (0, lacking), value=fill)
            parts.append(value)
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1:
            longest = max(part.shape[1] for part in parts)
            parts = [torch.cat([p, p.new_zeros(p.shape[0], longest - p.shape[1], *p.shape[2:])], 1) for p in parts]
        joined[name] = torch.cat(parts)
    return joined
