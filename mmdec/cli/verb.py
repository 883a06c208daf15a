"""What all verbs have in common: an example in the help, and errors that name options as they are typed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperOption

from mmdec import InputError

STDOUT = "-"


class Verb(TyperCommand):
    """A command. Its errors name `--batch-size` where the library says `batch_size`.

    Where `--json` takes a file it needs none: at the end, or before another option, it means `--json -`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, once the value of `--json` is there."""
        takes_file = any("--json" in option.opts and not getattr(option, "is_flag", True) for option in self.params)
        whole: list[str] = []
        for index, word in enumerate(args):
            whole.append(word)
            following = args[index + 1] if index + 1 < len(args) else "--"
            if takes_file and word == "--json" and following.startswith("-") and following != STDOUT:
                whole.append(STDOUT)
        return super().parse_args(ctx, whole)

    def invoke(self, ctx: Any) -> Any:
        """As click does."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise InputError(as_typed(str(error), self.params)) from error


def as_typed(message: str, params: Iterable[Any]) -> str:
    """An error of the library with the verb's options as they are typed."""
    for option in params:
        if isinstance(option, TyperOption) and option.name:
            typed = next(name for name in option.opts if name.startswith("--"))
            message = message.replace(f"`{option.name}`", f"`{typed}`")
    return message


def as_verb(example: str) -> dict[str, Any]:
    """For typer's `command`. example: what follows `mmdec`; the help ends with it."""
    return {"cls": Verb, "epilog": f"Example: mmdec {example}"}
