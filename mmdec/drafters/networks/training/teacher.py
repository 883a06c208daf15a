"""The frozen target as a teacher: computes its features (hidden states), its first layer's inputs, and its answers.

For samples that are used again, the features and the first layer's inputs at visual tokens can be stored on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from mmdec.checks.devices import has_fast_bfloat16
from mmdec.checks.fingerprint import fingerprint
from mmdec.drafters.networks.training.samples import Inputs, append, join
from mmdec.errors import InputError
from mmdec.targets.decoder import DecoderTarget
from mmdec.targets.registry import make_target
from mmdec.training.processes import lock_folder
from mmdec.training.stores import HiddenStateStore, TokenStore
from mmdec.types import Draft, Needs, Scores


@dataclass(frozen=True)
class TargetFeatures:
    """The target's features of one text of L tokens.

    The text is P prompt tokens, then the answer's tokens without the last one, after which nothing is drafted.
    """

    prompt: int  # P, number of tokens in the prompt
    answer: list[int]  # ids of the L - P + 1 answer tokens, the last one included
    embeds: Tensor  # (L, H), the first layer's inputs if `Needs.embeds` is set, else embeddings of the token ids
    features: Tensor  # (L, k * H), hidden states of the k layers in `Needs.layers`, concatenated
    visual: Tensor  # (L,) bool, True at tokens of a picture, a video or a sound
    positions: Tensor | None = None  # (3, L) int64, position ids of a target with M-RoPE; else None

    def to(self, device: torch.device) -> TargetFeatures:
        """Return the same features on another device, in float32."""
        return TargetFeatures(
            self.prompt,
            self.answer,
            self.embeds.to(device).float(),
            self.features.to(device).float(),
            self.visual.to(device),
            None if self.positions is None else self.positions.to(device),
        )


class Teacher:
    """Computes features and answers with a frozen target.

    It holds the model, its adapter, and ids of special tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False).eval()
        target = make_target(self.model)
        if not isinstance(target, DecoderTarget):
            raise InputError(
                f"`base` must be a decoder-only language model, with or without images, but is {type(model).__name__}. "
                "Give the folder or Hugging Face id of such a model."
            )
        self.target = target
        self.config: Any = model.config.get_text_config(decoder=True)
        settings: Any = model.config
        names = ("image_token_id", "video_token_id", "image_token_index", "audio_token_id")
        self.marks = sorted({token for name in names if isinstance(token := getattr(settings, name, None), int)})
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.ends = frozenset([ends] if isinstance(ends, int) else ends or [])
        pad = getattr(model.generation_config, "pad_token_id", None)
        self.pad = int(pad if pad is not None else min(self.ends, default=0))

    @property
    def name(self) -> str:
        """A hash of the target's weights. It does not depend on where the model is stored."""
        return fingerprint(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """The weight (V, H) of the LM head, and its bias (V,) or None."""
        output: Any = self.model.get_output_embeddings()
        return output.weight, getattr(output, "bias", None)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (..., V) float32 of hidden states (..., H) at the input of the LM head."""
        weight, bias = self.head
        return linear(features.to(weight.dtype), weight, bias).float()

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (..., H) of text tokens (...)."""
        table: Any = self.model.get_input_embeddings()
        return table(tokens)

    def visual(self, ids: Tensor) -> Tensor:
        """Return (...) bool: True where token ids (...) are placeholders of pictures, videos or sounds."""
        return torch.isin(ids, torch.tensor(self.marks, device=ids.device, dtype=ids.dtype))

    @torch.no_grad()
    def compute_features(
        self, prompts: Sequence[Inputs], answers: Sequence[Sequence[int]], needs: Needs, half: bool = False
    ) -> list[TargetFeatures]:
        """Compute the features of a batch of texts in one pass.

        Decoding uses the same code of the target, so a network reads the same features in training and in decoding.

        Args:
            prompts: The target's input tensors for each text, with batch size 1.
            answers: Token ids of each answer.
            needs: The layers whose hidden states are returned, and whether visual tokens have their projected
                embeddings.
            half: Compute matrix products in bfloat16, if the device is fast in it.

        Returns:
            The features of each text.
        """
        rows = [append(prompt, answer[:-1]) for prompt, answer in zip(prompts, answers, strict=True)]
        batch = self.to_device(join(rows, self.pad, left=True))
        half = half and has_fast_bfloat16(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            context = self.target.run_texts(batch, needs)
        features = torch.cat([context.features[layer] for layer in needs.layers], -1)
        embeds = self.embed(batch["input_ids"]) if context.embeds is None else context.embeds
        visual = context.visual
        positions = context.positions if len(context.positions) > 1 else None
        readings = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            begin = prompt["input_ids"].shape[1]
            part = slice(-(begin + len(answer) - 1), None)
            row_positions = None if positions is None else positions[:, row, part]
            readings.append(
                TargetFeatures(
                    begin, list(answer), embeds[row, part], features[row, part], visual[row, part], row_positions
                )
            )
        return readings

    def score_draft(self, prompts: Sequence[Inputs], draft: Draft, half: bool = False) -> Scores:
        """Run the target over prompts, and then over drafts below them; gradients flow to the inputs of soft nodes.

        Args:
            prompts: The target's input tensors for each row of the draft, with batch size 1.
            draft: One tree a row.
            half: Compute matrix products in bfloat16, if the device is fast in it.
        """
        batch = self.to_device(join(prompts, self.pad, left=True))
        half = half and has_fast_bfloat16(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return self.target.run_drafts(batch, draft)

    @torch.no_grad()
    def answer(
        self, prompts: Sequence[Inputs], limit: int, sampling: Mapping[str, float] | None = None
    ) -> list[list[int]]:
        """Answer the prompts.

        Args:
            limit: Maximum tokens of an answer.
            sampling: Options of `generate` by which answers are sampled, or None for greedy answers.

        Returns:
            The token ids of each answer, with the EOS token if it is complete.
        """
        batch = self.to_device(join(prompts, self.pad, left=True))
        generated: Any = self.model.generate(  # type: ignore[operator] # pyright misreads its type
            **batch,
            do_sample=sampling is not None,
            num_beams=1,
            max_new_tokens=limit,
            pad_token_id=self.pad,
            **(sampling or {}),
        )
        return [self._cut_at_end(row) for row in generated[:, batch["input_ids"].shape[1] :].tolist()]

    def _cut_at_end(self, tokens: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(tokens) if token in self.ends]
        return tokens[: ends[0] + 1] if ends else tokens

    def to_device(self, batch: Inputs) -> Inputs:
        """Move input tensors to the target's device, and floating-point ones, such as pixels, also to its dtype."""
        return {
            name: value.to(self.device, self.model.dtype if value.is_floating_point() else value.dtype)
            for name, value in batch.items()
        }


def load_teacher_model(base: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a vision-language or language model of transformers.

    Args:
        base: Folder or Hugging Face id.

    Raises:
        InputError: If transformers cannot read its configuration.
    """
    try:
        config = AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise InputError(
            f"`base` must be a model of transformers, but '{base}' is not ({error!s:.300}). Give a folder or a "
            "Hugging Face id."
        ) from None
    reads_images = getattr(config, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    return kind.from_pretrained(base, dtype=dtype)


MAX_WRITERS = 1000  # maximum processes of one training that write to a folder, and maximum trainings at the same time


class FeatureStore:
    """Stores features on disk: sample name -> features.

    It takes 2 H bytes for each token and layer. If `needs.embeds` is set, it also takes 2 H bytes for the projected
    embedding of each visual token.

    Args:
        needs: Which features to store.
        half: Compute them in bfloat16.
        rank: Number of this process; processes that write at the same time have separate files.
    """

    def __init__(self, folder: Path, teacher: Teacher, needs: Needs, half: bool, rank: int = 0) -> None:
        size = teacher.config.hidden_size
        self.teacher, self.needs, self.half = teacher, needs, half
        self.locks = ExitStack()
        number = writer_number(folder, rank, self.locks)
        self.features = HiddenStateStore(folder / "features", len(needs.layers) * size, number)
        # `HiddenStateStore` stores states with token ids; here the indices of the visual tokens take the place of token
        # ids
        self.visual = HiddenStateStore(folder / "visual", size, number) if needs.embeds else None
        # position ids, only of targets with M-RoPE: all of the first axis, then the second, then the third
        self.positions = TokenStore(folder / "positions", number)

    def __contains__(self, name: object) -> bool:
        return name in self.features and (self.visual is None or name in self.visual)

    def get(self, name: str, answer: Sequence[int]) -> TargetFeatures:
        """Return the stored features of a sample.

        Args:
            answer: Token ids of the sample's answer.

        Raises:
            KeyError: If the features are not stored.
        """
        tokens, features = self.features.get(name)
        ids = torch.tensor(tokens, device=self.teacher.device)
        embeds, visual = self.teacher.embed(ids).float().cpu(), self.teacher.visual(ids).cpu()
        if self.visual is not None:
            columns, projected = self.visual.get(name)
            embeds[columns] = projected
        axes = self.positions.get(name)
        positions = None if axes is None else torch.tensor(axes).view(3, -1)
        return TargetFeatures(len(tokens) - len(answer) + 1, list(answer), embeds, features, visual, positions)

    def add(self, readings: Mapping[str, tuple[list[int], TargetFeatures]]) -> dict[str, TargetFeatures]:
        """Store features.

        Args:
            readings: Sample name -> (token ids, features).

        Returns:
            Sample name -> features rounded to half precision, as `get` will return them. So training computes the same
            numbers, whether features are read from disk or not.
        """
        rounded = {}
        for name, (_, reading) in readings.items():
            embeds = reading.embeds.float().clone()
            if self.visual is not None:
                embeds[reading.visual] = embeds[reading.visual].half().float()
            rounded[name] = replace(reading, embeds=embeds, features=reading.features.half().float())
        if self.visual is not None:
            self.visual.add(
                {
                    name: (reading.visual.nonzero()[:, 0].tolist(), reading.embeds[reading.visual])
                    for name, (_, reading) in readings.items()
                }
            )
        self.positions.add(
            {
                name: reading.positions.flatten().tolist()
                for name, (_, reading) in readings.items()
                if reading.positions is not None
            }
        )
        self.features.add({name: (tokens, reading.features) for name, (tokens, reading) in readings.items()})
        return rounded

    def load_or_compute(
        self, names: Sequence[str], prompts: Sequence[Inputs] | None, answers: Sequence[Sequence[int]]
    ) -> list[TargetFeatures]:
        """Return the features of each sample of a batch, on the CPU.

        Features that are not stored are computed and stored.

        Args:
            names: The samples.
            prompts: The target's input tensors for each; None if all features are stored.
            answers: Token ids of each answer.
        """
        if prompts is not None:
            readings = self.teacher.compute_features(prompts, answers, self.needs, self.half)
            fresh = {}
            for name, prompt, answer, reading in zip(names, prompts, answers, readings, strict=True):
                if name not in self:
                    tokens = append(prompt, answer[:-1])["input_ids"][0].tolist()
                    fresh[name] = (tokens, reading.to(torch.device("cpu")))
            rounded = self.add(fresh)
        else:
            rounded = {}
        return [
            rounded[name] if name in rounded else self.get(name, answer)
            for name, answer in zip(names, answers, strict=True)
        ]


def writer_number(folder: Path, rank: int, locks: ExitStack) -> int:
    """Reserve a number for the files that this process writes to a folder, so that no two processes write to one file.

    Args:
        rank: Number of this process.
        locks: The number is reserved until it is closed or the process ends.

    Returns:
        `rank`, or `rank` plus a multiple of `MAX_WRITERS` if another training uses it.
    """
    for attempt in range(MAX_WRITERS):
        number = rank + MAX_WRITERS * attempt
        try:
            locks.enter_context(lock_folder(folder / "writers" / str(number), "training"))
        except InputError:
            continue
        return number
    raise InputError(f"`cache_dir` must have at most {MAX_WRITERS} runs at once, but '{folder}' has more. Wait.")
