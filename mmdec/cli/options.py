"""Code that the subcommands share.

It has types of options, an example at the end of each help, and errors that name options as the user types them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from mmdec import InputError
from mmdec.checks.files import printable
from mmdec.errors import rename_arguments
from mmdec.evaluation.options import AsrEvalOptions
from mmdec.tasks.options import OptionInfo, option_help, options_of

if TYPE_CHECKING:
    import torch

SPEECH_CORPUS = Path("data/natural/manifest.tsv")
SPEECH_TEXT = Path("data/everyday"), Path("data/phrasebook")

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="IN...", help="Audio files, or folders: all audio files in them and in their folders."),
]
Model = Annotated[
    str, typer.Option("--model", "-m", help="A model that comes with mmdec, a folder, or a Hugging Face id.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda. Default: a GPU if there is one.")]
BenchDevice = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16; int8 for a Whisper on a CPU. Default: bfloat16 on a GPU, else float32.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="CPU threads. Default: by the model's size and the free CPUs."),
]
BenchThreads = Annotated[int, typer.Option("--threads", min=1, metavar="N", help="CPU threads.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object for each file, one on each line.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help=option_help(AsrEvalOptions, "limit"))]
Judging = Annotated[
    Path | None,
    typer.Option(
        "--judge",
        metavar="DIR",
        help="Folder of a multilingual Whisper: transcribes the English, and is compared.",
    ),
]
AbsolutePaths = Annotated[
    bool, typer.Option("--allow-absolute", help=option_help(AsrEvalOptions, "allow_absolute_paths"))
]
Heads = Annotated[Path | None, typer.Option(help=option_help(AsrEvalOptions, "heads"))]
AudioFiles = Annotated[
    list[Path] | None,
    typer.Option("--audio", metavar="FILE", help="A recording of your own, as the arguments are. Repeat it."),
]
Language = Annotated[str, typer.Option(help=option_help(AsrEvalOptions, "language"))]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help=option_help(AsrEvalOptions, "max_new_tokens"))]


def resolve_dtype(dtype: str | None, device: str | None, integers: bool = False) -> torch.dtype:
    """Return the dtype that `--dtype` names, or the fastest one for the device if the option was left out.

    Args:
        dtype: Its name. None: bfloat16 if `device` is a GPU, else float32.
        device: None: a GPU if there is one.
        integers: Allow int8, too.

    Raises:
        InputError: If `dtype` names none of these.
    """
    from mmdec.checks.devices import check_dtype, fastest_dtype

    return fastest_dtype(device) if dtype is None else check_dtype(dtype, integers)


def silence_transformers() -> None:
    """Turn off transformers' warnings and progress bars, so that stderr shows only mmdec's."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def log(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr)


STDOUT = "-"


class MmdecCommand(TyperCommand):
    """A command whose errors name options as they are typed: `--batch-size` for the library's `batch_size`.

    `--json` takes a file, but also works without one: at the end, or before another option, it means `--json -`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the missing value of `--json`, then parse as click does."""
        takes_file = any("--json" in option.opts and not getattr(option, "is_flag", True) for option in self.params)
        completed: list[str] = []
        for index, word in enumerate(args):
            completed.append(word)
            following = args[index + 1] if index + 1 < len(args) else "--"
            if takes_file and word == "--json" and following.startswith("-") and following != STDOUT:
                completed.append(STDOUT)
        with _range_errors():
            return super().parse_args(ctx, completed)

    def invoke(self, ctx: Any) -> Any:
        options = [param for param in self.params if isinstance(param, TyperOption)]
        typed = {str(option.name): next(name for name in option.opts if name.startswith("--")) for option in options}
        mark = _cli_names.set({**typed, **COMMANDS})
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise error.with_names(_cli_names.get()) from error
        finally:
            _cli_names.reset(mark)


@contextmanager
def _range_errors() -> Iterator[None]:
    """Raise InputError for a number that is out of range or no number.

    typer's own message, pydantic's, does not name the value.
    """
    try:
        yield
    except typer.BadParameter as error:
        faults: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
        low, high = (getattr(error.param, bound, None) for bound in ("min", "max"))
        typed = next((name for name in getattr(error.param, "opts", ()) if name.startswith("--")), None)
        number = next((kind for kind in ("int", "float") if kind in str(getattr(error.__cause__, "title", ""))), None)
        if not faults or typed is None or number is None:
            raise
        kind = "a whole number" if number == "int" else "a number"
        limits = {(False, False): "", (False, True): f" of at most {high}", (True, False): f" of at least {low}"}
        bounds = limits.get((low is not None, high is not None), f" from {low} to {high}")
        value = printable(str(faults[0].get("input")))
        raise InputError(f"`{typed}` must be {kind}{bounds}, but is {value:.60}. See `--help`.") from None


COMMANDS = {"mmdec.translate_speech": "mmdec translate", "mmdec.transcribe": "mmdec transcribe"}  # call -> its command
# of the command that runs: name in the library -> as the user types it
_cli_names: ContextVar[Mapping[str, str]] = ContextVar("_cli_names", default=COMMANDS)


def in_cli_syntax(message: str) -> str:
    """Return a message of the library in the syntax of the command line: `batch_size` becomes `--batch-size`.

    Such messages are notes and the errors of single files.
    """
    return rename_arguments(message, _cli_names.get())


def command_arguments(example: str) -> dict[str, Any]:
    """Return keyword arguments for typer's `command`.

    Args:
        example: Arguments of `mmdec`, shown at the end of the help.
    """
    return {"cls": MmdecCommand, "epilog": f"Example: mmdec {example}"}


def is_typed(context: typer.Context, name: str) -> bool:
    """Return whether the user typed an option, possibly with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a typer command so that the fields of a dataclass parameter become options.

    The command gets an object of the dataclass.
    """
    parameters = list(signature(command, eval_str=True).parameters.values())
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation for parameter in parameters if is_dataclass(parameter.annotation)
    }
    options = {name: _group_options(kind) for name, kind in groups.items()}

    @wraps(command)
    def with_groups(**values: Any) -> None:
        groups_of_options = {
            name: groups[name](**{option.name: values.pop(option.name) for option in options[name]}) for name in groups
        }
        command(**values, **groups_of_options)

    plain = [parameter for parameter in parameters if parameter.name not in groups]
    # typer reads the options from the signature
    vars(with_groups)["__signature__"] = Signature([*plain, *chain.from_iterable(options.values())])
    return with_groups


def _group_options(kind: Any) -> list[Parameter]:
    """Return the options of a dataclass.

    Of those declared with `option`, they are all that have a type on the command line; of another dataclass, its fields
    whose annotations are typer's.
    """
    declared = [option for option in options_of(kind) if "option" in option.metadata]
    if not declared:
        hints = get_type_hints(kind, include_extras=True)
        return [
            Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(kind, name), annotation=hint)
            for name, hint in hints.items()
            if get_origin(hint) is Annotated
        ]
    options = []
    for option in declared:
        info: OptionInfo = option.metadata["option"]
        if info.typed is not None:
            names = [info.name or f"--{option.name.replace('_', '-')}", *filter(None, [info.short])]
            shown = typer.Option(*names, help=info.help, min=info.minimum, max=info.maximum, metavar=info.metavar)
            annotation = Annotated[info.typed, shown]
            options.append(
                Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)
            )
    return options
