"""What the options of the public calls share: each call has one frozen dataclass, whose fields are its options.

The call's signature, its subcommand and the table in the API reference are made from the fields, so that an option is
added in one place. These dataclasses need no torch: the help of the command line reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mmdec.checks.arguments import check_callable, check_threads, format_value
from mmdec.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import ProcessorMixin

    from mmdec.core.budget import DraftSize
    from mmdec.core.statistics import DecodingStatistics
    from mmdec.core.verify import Relaxation, RuleName
    from mmdec.types import Round

MAX_BATCH = 4096  # maximum batch size
STRICT_HELP = "Refuse damaged or cut-off files. Default: read the rest, and note what is missing."
T = TypeVar("T")


@dataclass(frozen=True)
class OptionInfo:
    """Describes an option for people, and how it is typed on the command line."""

    help: str
    typed: Any = None  # its type on the command line; None: it is not an option of the command
    name: str = ""  # its name on the command line; "": by the field's name
    short: str = ""  # short name on the command line, such as "-d"
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None


def option(default: T, help: str, typed: Any = None, **named: Any) -> T:
    """Declare a field of an options dataclass.

    Args:
        default: The field's default.
        help: What the option does, in a sentence or two.
        typed: Its type on the command line; None: it is not an option of the command.
        named: Further fields of `OptionInfo`.
    """
    return field(default=default, metadata={"option": OptionInfo(help, typed, **named)})


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options that all calls have."""

    device: str | torch.device | None = option(None, "Where a named model runs. Default: a GPU if there is one.")
    dtype: torch.dtype | str | None = option(None, "Precision of a named model. Default: float32.")
    threads: int | None = option(
        None, "CPU threads. Default: by the model's size and the free CPUs.", int | None, metavar="N", minimum=1
    )
    min_confidence: float | None = option(
        None, "Refuse outputs that are less likely to be right.", float | None, metavar="P", minimum=0, maximum=1
    )

    def __post_init__(self) -> None:
        check_threads(self.threads)
        self._set(min_confidence=check_min_confidence(self.min_confidence))

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> Self:
        """Make options from the keyword arguments of a call."""
        return cls(**keywords)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as keyword arguments of the call."""
        values = {
            declared.name: (getattr(self, declared.name), declared.default) for declared in options_of(type(self))
        }
        return {name: value for name, (value, default) in values.items() if value is not default and value != default}

    def _set(self, **values: Any) -> None:
        """Replace values by their checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(TaskOptions):
    """The options of calls that decode by transformers' `generate`."""

    processor: ProcessorMixin | None = option(None, "The processor of a loaded model.")
    rule: RuleName | Relaxation | None = option(
        None, "The rule by which drafted tokens are accepted. Default: by `do_sample`."
    )
    num_speculative_tokens: DraftSize = option(None, "Draft size: tokens, or (tokens, depth). Default: learned.")
    seed: int | None = option(None, "Seed of the random numbers, for sampling.")
    statistics: DecodingStatistics | None = option(None, "Acceptance rates measured in earlier calls.")
    on_round: Callable[[Round], None] | None = option(None, "Called with each decoding round.")
    generate_options: Mapping[str, Any] = field(default_factory=lambda: {})  # options of `generate`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_callable("on_round", self.on_round, "a function of a round")

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> Self:
        """Make options from the keyword arguments of a call; unknown ones are options of `generate`."""
        values = {name: value for name, value in keywords.items() if name in option_names(cls)}
        return cls(**values, generate_options={name: value for name, value in keywords.items() if name not in values})

    def changed(self) -> dict[str, Any]:
        return super().changed() | dict(self.generate_options)


def options_of(kind: type[Any]) -> list[Field[Any]]:
    """Return the options of a dataclass, its own before those that it inherits."""
    named = {declared.name: declared for declared in fields(kind) if declared.default is not MISSING}
    order = [name for cls in kind.__mro__ for name in vars(cls).get("__annotations__", ())]
    return [named[name] for name in dict.fromkeys(order) if name in named]


def option_names(kind: type[Any]) -> set[str]:
    """Return the names of the options of a dataclass."""
    return {declared.name for declared in options_of(kind)}


def option_help(kind: type[Any], name: str) -> str:
    """Return the help of an option of a dataclass."""
    info: OptionInfo = next(declared for declared in fields(kind) if declared.name == name).metadata["option"]
    return info.help


def with_options_of(kind: type[TaskOptions]) -> Callable[[T], T]:
    """Decorate a public call that takes `**options`: its signature, as `help` shows it, names each option."""

    def decorate(call: T) -> T:
        signature = inspect.signature(call)  # type: ignore[arg-type] # it is a function
        *before, last = signature.parameters.values()
        keywords = [
            inspect.Parameter(
                declared.name, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=declared.type
            )
            for declared in options_of(kind)
        ]
        further = [last] if issubclass(kind, GenerateOptions) else []
        vars(call)["__signature__"] = signature.replace(parameters=[*before, *keywords, *further])
        return call

    return decorate


def check_min_confidence(value: float | None) -> float | None:
    """Return the argument `min_confidence`; raise InputError unless it is None or a number in [0, 1]."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise InputError(
            f"`min_confidence` must be a number from 0 to 1, but is {format_value(value)}. Leave it out for none."
        )
    return float(value)
