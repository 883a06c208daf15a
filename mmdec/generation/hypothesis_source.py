"""Gives each input of a call the text that `mmdec.drafters.hypothesis` drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from mmdec.checks.caller import warn_user
from mmdec.checks.devices import PASSED_ON
from mmdec.drafters.hypothesis import HypothesisDrafter, Script, TokenText, clean_text
from mmdec.errors import InputError
from mmdec.generation.drafter_source import DrafterSource, DraftInput, LoadedTarget
from mmdec.pretrained.load_small_model import required_tokenizer

Listen = Callable[[Tensor], str]  # writes the text of 16 kHz samples (T,)


@final
@dataclass(frozen=True)
class Hypothesis(DrafterSource):
    """What `mmdec.hypothesis` returns: texts, or a recogniser that writes them, as a drafter for any model."""

    scripts: tuple[Script, ...]  # one for each input of a call, or one for all of them
    is_list: bool = False  # whether there must be one for each input
    listen: Listen | None = None  # writes the texts instead
    source: str = "text"  # for the drafter's name, under which acceptance rates are stored
    tokenizer: Any = None  # the target's; None: the one in its folder
    _token_texts: WeakKeyDictionary[PreTrainedModel, tuple[Any, TokenText]] = field(
        default_factory=lambda: WeakKeyDictionary(), repr=False, compare=False
    )

    def __reduce__(self) -> tuple[type[Hypothesis], tuple[object, ...]]:
        return Hypothesis, (self.scripts, self.is_list, self.listen, self.source, self.tokenizer)

    def for_target(self, target: LoadedTarget) -> Hypothesis:
        return self if self.tokenizer is not None else replace(self, tokenizer=target.tokenizer)

    def check_inputs(self, count: int, sound: bool = False) -> None:
        if self.listen is not None and not sound:
            raise InputError(
                "`drafter` must be a hypothesis of texts for this call, which has no sound to recognise, but is one of "
                "a model. Transcribe the sound first, and pass the text."
            )
        if self.is_list and len(self.scripts) != count:
            raise InputError(
                f"`drafter` must have a text for each of {count} inputs, but has {len(self.scripts)}. Add or drop some."
            )

    def for_inputs(self, inputs: Sequence[DraftInput]) -> DrafterSource:
        scripts = [self._script(source) for source in inputs]
        begins = [script.place_at(source.start, source.total) for script, source in zip(scripts, inputs, strict=True)]
        return _InputHypothesis(self, scripts, begins)

    def drafter_for(self, model: PreTrainedModel) -> HypothesisDrafter:
        return HypothesisDrafter(self.scripts or (Script(""),), self.token_text(model), source=self.source)

    def token_text(self, model: PreTrainedModel) -> TokenText:
        """Return the target's tokenizer, as drafts need it.

        Raises:
            InputError: If there is none.
        """
        tokenizer = required_tokenizer(model, self.tokenizer, "mmdec.hypothesis")
        cached = self._token_texts.get(model)
        if cached is None or cached[0] is not tokenizer:
            settings: Any = model.generation_config
            untimed: int | None = getattr(settings, "no_timestamps_token_id", None)
            end: list[int] | int | None = settings.eos_token_id
            config: Any = model.config
            size = config.get_text_config(decoder=True).vocab_size
            ends = [] if end is None else end if isinstance(end, list) else [end]
            cached = tokenizer, TokenText(tokenizer, size, None if untimed is None else untimed + 1, ends)
            self._token_texts[model] = cached
        return cached[1]

    def _script(self, source: DraftInput) -> Script:
        if self.listen is None:
            return self.scripts[source.index if self.is_list else 0]
        samples = source.samples
        if samples is None:
            self.check_inputs(1)
            return Script("")
        try:
            return Script(clean_text(self.listen(samples)))
        except (*PASSED_ON, InputError):
            raise
        except Exception as error:  # it may be the caller's code: any error only ends the drafting
            warn_user(
                f"drafter '{self.source}' failed, so this recording is decoded without drafts; the output is not "
                f"affected ({type(error).__name__}: {error})",
                RuntimeWarning,
            )
            return Script("")


@final
class _InputHypothesis(DrafterSource):
    """The hypothesis of some inputs of a call.

    Its drafter is the same for all windows of a recording.
    """

    def __init__(self, hypothesis: Hypothesis, scripts: Sequence[Script], begins: Sequence[int]) -> None:
        self._hypothesis, self._scripts, self._begins = hypothesis, scripts, begins
        self._drafter: HypothesisDrafter | None = None

    def drafter_for(self, model: PreTrainedModel) -> HypothesisDrafter:
        if self._drafter is None:
            self._drafter = HypothesisDrafter(
                self._scripts, self._hypothesis.token_text(model), self._begins, self._hypothesis.source
            )
        return self._drafter
