"""`mmdec chat`: a dialogue with a language model in the terminal, or turn by turn from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdec import InputError
from mmdec.cli.options import Device, Dtype, Threads, in_cli_syntax, log, resolve_dtype, silence_transformers
from mmdec.cli.progress import show_loading
from mmdec.core.summary import pluralise, rounds_line
from mmdec.drafters.built_in import AUTO, FALLBACK_DRAFTER, built_in_names

if TYPE_CHECKING:
    from mmdec.cli.text_chat import TextChat
    from mmdec.generation.drafter_source import DrafterSource

EXIT = "/exit"
PROMPT = "> "


def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A language model: a folder or a Hugging Face id.")],
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            "-d",
            help=f"{', '.join(built_in_names('ready'))} or another registered name; a folder or Hugging Face id of a "
            f"drafter or of a smaller model; none (no drafts); or {AUTO}: the model's own, else {FALLBACK_DRAFTER}.",
        ),
    ] = AUTO,
    drafter_inner: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="If the drafter is a smaller model: lookup or recycling drafts for it."),
    ] = None,
    drafter_prompt: Annotated[
        int | None,
        typer.Option(metavar="N", help="If the drafter is a smaller model: it reads at most N tokens of the chat."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="How the model should answer: the first message.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum length of an answer. Default: the model's.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, help="0 is greedy decoding. Default: the model's settings.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the random numbers, for sampling.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
) -> None:
    """Talk to a language model. Answers are printed as they are accepted, and earlier turns are remembered.

    Ctrl-C stops an answer; /exit or the end of the input ends the chat. If the input is a file or a pipe, each line is
    a turn.
    """
    with show_loading(model):
        import mmdec
        from mmdec.cli.text_chat import TextChat
        from mmdec.generation.speculation import DecodingOptions, Speculation
        from mmdec.pretrained.language_model import LoadedLanguageModel
        from mmdec.targets.registry import make_target
        from mmdec.tasks.threads import with_threads

        silence_transformers()
        chosen: Any = None if drafter == "none" else drafter
        if drafter_inner is not None or drafter_prompt is not None:
            chosen = _small_model(drafter, drafter_inner, drafter_prompt)
        loaded = mmdec.load(model, device, dtype=resolve_dtype(dtype, device))
        if not isinstance(loaded, LoadedLanguageModel):
            raise InputError(
                f"`model` must be a language model, but '{model}' is not one. Use `mmdec describe` for pictures, "
                "`mmdec transcribe` for speech."
            )
        speculation = Speculation(DecodingOptions(chosen, seed=seed))
        speculation.checked_drafter(make_target(loaded.model))
    sampled = None if temperature is None else temperature > 0
    options = {"max_new_tokens": max_new_tokens, "do_sample": sampled, "temperature": temperature or None}
    talk, failed = TextChat(loaded, speculation, options, system), False
    for line in _turns():
        try:
            with with_threads(threads, loaded.model):
                _print_answer(talk, line)
        except InputError as error:
            log(f"error: {in_cli_syntax(str(error))}")
            failed = True
    if failed:
        raise typer.Exit(1)


def _small_model(drafter: str, inner: str | None, prompt: int | None) -> DrafterSource:
    """Make a drafter of a smaller model. Errors have the names of the command's options."""
    from mmdec import small_model

    try:
        return small_model(drafter, inner=inner, prompt=prompt)
    except InputError as error:
        names = {"model": "drafter", "inner": "drafter_inner", "prompt": "drafter_prompt"}
        raise error.with_names(names) from error


def _print_answer(talk: TextChat, line: str) -> None:
    """Print the answer to a line, and what it cost on stderr. Ctrl-C ends it."""
    stopped = ""
    try:
        for piece in talk.answer(line):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stopped = "; stopped"
    print(flush=True)
    usage = talk.usage
    note = f"; {in_cli_syntax(usage.note)}" if usage.note else stopped
    counts = rounds_line(usage.rounds, usage.tokens_per_round, lossless=True)
    log(f"[{pluralise(len(usage.tokens), 'token')} in {counts}{note}]")


def _turns() -> Iterator[str]:
    """Yield what the user types, line by line, until the end of the input or `/exit`."""
    while True:
        if sys.stdin.isatty():
            with suppress(ImportError):  # Windows has none
                import readline  # noqa: F401 # lets `input` edit lines
            try:
                line = input(PROMPT)
            except EOFError:
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
        if line.strip() == EXIT:
            return
        if line.strip():
            yield line.rstrip("\n")
