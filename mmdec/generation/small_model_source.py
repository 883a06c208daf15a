"""`mmdec.small_model`: a smaller model as a drafter, with options."""

from __future__ import annotations

import os
from typing import Any, final

from transformers import PreTrainedModel

from mmdec.checks.arguments import format_value
from mmdec.drafters.small_model.short_prompt import Shorten, check_prompt
from mmdec.drafters.small_model.staged import InnerDrafter, inner_drafter
from mmdec.errors import InputError
from mmdec.generation.drafter_source import DrafterCache, DrafterSource, LoadedTarget
from mmdec.hub.find import folder_by_name
from mmdec.pretrained.load_small_model import check_small_model, load_small_model, small_drafter
from mmdec.types import Drafter


def small_model(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    inner: str | InnerDrafter | None = None,
    prompt: int | Shorten | None = None,
) -> DrafterSource:
    """Let a smaller model draft, with options. Without options, pass the model itself as `drafter`.

    The text of the call stays the target's own, with each option.

    Args:
        model: A loaded model, or its folder or Hugging Face id. With `inner` or `prompt` it must have the target's
            tokenizer.
        inner: Drafts the small model's chains, so that the same chains take fewer of its passes: "lookup",
            "recycling", the name of a registered drafter, or an object after
            `mmdec.drafters.small_model.staged.InnerDrafter`. The rest of the last chain, which the target rejected, is
            drafted again, too. Trees, and chains that are sampled (`rule="residual"`), take a pass for each level.
            Default None: chains do, too.
        prompt: For long prompts of text: the maximum number of tokens that the small model reads. These are the
            prompt's beginning, its end, and the parts that have most words in common with the end. Or a function
            (ids) -> ids that chooses them. Default None: it reads the whole prompt.

    Returns:
        The value for `drafter=` of `generate`, `stream`, `speculate`, `describe` and `transcribe`. Several calls may
        share it; a folder is then loaded once.

    Raises:
        InputError: If there is no such model, if `inner` is no drafter or cannot take tokens back, or if `prompt` is
            neither a function nor a number of at least 16.

    References:
        Staged speculative decoding (2308.04623); SpecASR (2507.18181), for the rest of the last chain; RAPID
        (2502.20330), for the shorter prompt.
    """
    return SmallModelSource(model, inner, prompt)


@final
class SmallModelSource(DrafterSource):
    """What `mmdec.small_model` returns.

    Args:
        model, inner, prompt: As for `small_model`.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        inner: str | InnerDrafter | None,
        prompt: int | Shorten | None,
    ) -> None:
        self._inner = None if inner is None else inner_drafter(inner)
        self._prompt = check_prompt(prompt)
        folder_or_model = model if isinstance(model, PreTrainedModel) else folder_by_name(model, "model")
        if folder_or_model is None:
            raise InputError(
                f"`model` must be a loaded model, a model's folder or a Hugging Face id, but is {format_value(model)}. "
                "Name a smaller model."
            )
        self._model = folder_or_model
        self._arguments = model, inner, prompt
        if isinstance(self._model, PreTrainedModel):
            check_small_model(self._model)
            self.networks = (self._model,)
        self._tokenizer: Any = None  # the target's; None: the one in its folder
        self._drafters = DrafterCache()

    def __reduce__(self) -> tuple[type[SmallModelSource], tuple[object, ...]]:
        return SmallModelSource, self._arguments

    def for_target(self, target: LoadedTarget) -> SmallModelSource:
        source = object.__new__(SmallModelSource)  # a shallow copy: it shares the model and the drafters made so far
        vars(source).update(vars(self), _tokenizer=target.tokenizer)
        return source

    def drafter_for(self, model: PreTrainedModel) -> Drafter:
        return self._drafters.get(model, self._tokenizer, lambda: self._make(model))

    def _make(self, target: PreTrainedModel) -> Drafter:
        inner, prompt, tokenizer = self._inner, self._prompt, self._tokenizer
        if isinstance(self._model, PreTrainedModel):
            return small_drafter(self._model, target, None, tokenizer, inner=inner, prompt=prompt)
        return load_small_model(self._model, target, tokenizer, inner=inner, prompt=prompt)
