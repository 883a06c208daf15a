"""`mmdec describe`: a question about pictures, answered in text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdec import InputError, MmdecError
from mmdec.checks.files import failure_message, json_text, printable
from mmdec.cli.compare import Compare, Comparer
from mmdec.cli.inputs import IMAGE_FILES, combine_files, input_files, output_paths, try_write
from mmdec.cli.job_options import JobOptions
from mmdec.cli.options import (
    Device,
    Dtype,
    JsonLines,
    Model,
    resolve_dtype,
    silence_transformers,
    with_option_groups,
)
from mmdec.cli.outcomes import Outcomes, decode_all, print_note
from mmdec.cli.progress import progress_bar, show_loading
from mmdec.jobs.many import Work, decode_each
from mmdec.pretrained import DEFAULT_VLM
from mmdec.vision.options import DescribeOptions

if TYPE_CHECKING:
    from mmdec.pretrained.vlm import LoadedVlm
    from mmdec.vision.answer import Description

Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGE...",
        help="Pictures: PNG, JPEG, WebP, GIF, BMP or TIFF; or folders: all pictures in them and in their folders.",
    ),
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="The question.")]
Together = Annotated[bool, typer.Option("--together", help="One question over all pictures.")]
Stream = Annotated[bool, typer.Option("--stream", help="Print text as it is accepted, picture by picture.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="OUT", help="A folder; for one answer also a .txt or .json file."),
]
NewTokens = Annotated[int | None, typer.Option(min=1, help="Maximum number of new tokens. Default: the model's.")]


@with_option_groups
def describe(
    images: Images,
    prompt: Prompt = "Describe this image.",
    together: Together = False,
    as_json: JsonLines = False,
    stream: Stream = False,
    output: Output = None,
    model: Model = DEFAULT_VLM,
    max_new_tokens: NewTokens = None,
    device: Device = None,
    dtype: Dtype = None,
    compare: Compare = False,
    options: DescribeOptions = DescribeOptions(),
    job: JobOptions = JobOptions(),
) -> None:
    """Ask a vision-language model about pictures. A drafter makes it faster; the text stays the model's own.

    If a picture fails, the others are still answered. Failed pictures are listed, and the exit code is 1.
    """
    if stream and (as_json or output is not None):
        raise InputError("`--stream` cannot be combined with `--json` or `--output`. Drop one of them.")
    suffix = ".json" if as_json or (output is not None and output.suffix.lower() == ".json") else ".txt"
    drafter = options.drafter
    generate = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    options = replace(
        options,
        drafter=None if drafter == "none" else drafter,
        batch_size=1 if stream or compare else options.batch_size,
        generate_options={**generate, "do_sample": False} if compare else generate,
    )
    if job.has_many_inputs(images):
        keywords = options.changed() | {"prompt": prompt}
        work = Work("describe", model, options=keywords, device=device, dtype=dtype)
        refused = {"compare": compare, "stream": stream, "together": together}
        return job.run(work, images, output, IMAGE_FILES, refused)
    files = input_files(images, IMAGE_FILES, output)
    questions = [combine_files(files)] if together else files
    targets = output_paths([file.path for file in files], output, (".txt", ".json"), suffix, len(questions))
    outcomes = Outcomes(questions, targets, model)
    comparer = Comparer(compare, str(drafter), stream=stream)
    with show_loading(model, quiet=as_json):
        from mmdec.pretrained.vlm import load_vlm

        silence_transformers()
        vlm = load_vlm(model, device, resolve_dtype(dtype, device))
    names: list[Any] = [tuple(file.name for file in files)] if together else [file.name for file, _ in outcomes.todo]
    speaker = partial(_speak, outcomes.has_many_files) if stream else None

    def report(index: int, result: Description | str) -> None:
        file, target = outcomes.todo[index]
        error = result if isinstance(result, str) else try_write(target, _content(result, suffix))
        if error:
            outcomes.add_failure(file.name, error)
        elif not isinstance(result, str):
            if not stream:
                print(
                    _report(names[index], target, result, as_json, outcomes.has_many_files, comparer.fields()),
                    flush=True,
                )
            print_note(file.name, result.note)
            comparer.print_comparison(file.name, outcomes.has_many_files)
            outcomes.add_output(file.name, result.confidence)

    _describe_all(names, prompt, vlm, options, speaker, comparer, report)
    outcomes.finish(comparer.code)


def _speak(has_many_files: bool, image: Any) -> Callable[[str], None]:
    """Return a callback that prints pieces of an answer.

    If there are several pictures, print this picture's name at once.

    Args:
        image: Name of the picture, or names of the pictures.
    """
    if has_many_files:
        print(f"{printable(str(image))}:", flush=True)
    return lambda text: print(text, end="", flush=True)


def _content(result: Description, suffix: str) -> str:
    return (json_text(result.to_dict(), 2) if suffix == ".json" else result.text) + "\n"


def _describe_all(
    questions: Sequence[Any],
    prompt: str,
    vlm: LoadedVlm,
    options: DescribeOptions,
    speaker: Callable[[Any], Callable[[str], None]] | None,
    comparer: Comparer,
    report: Callable[[int, Any], None],
) -> None:
    """Decode the questions.

    Args:
        questions: The path of a picture, or a tuple of paths for one question about several pictures.
        speaker: Takes an entry of `questions`, and returns the callback that prints its answer while it is decoded;
            None: decode all together, and print nothing.
        comparer: For `--compare`, decodes each question without drafts, too.
        report: Called with each question's index, and its answer or an error message.
    """
    from mmdec import describe

    call = partial(describe, prompt=prompt, model=vlm, **options.changed())
    if speaker is not None:
        call([])  # an empty call only checks the arguments; later errors come from one picture
        for index, source in enumerate(questions):
            report(index, _stream_answer(source, call, speaker))
        return
    with progress_bar(count=True) as progress:
        task = progress.add_task("pictures", total=len(questions))

        def report_and_count(index: int, result: Any) -> None:
            progress.update(task, advance=1)
            report(index, result)

        if comparer.on:
            for index, source in enumerate(questions):
                report_and_count(index, *decode_each([source], comparer.both(call)))
            return
        decode_all(
            questions,
            lambda sources, on_description: call(sources, on_description=on_description),
            report_and_count,
            options.min_confidence,
        )


def _stream_answer(
    source: Any, call: Callable[..., Any], speaker: Callable[[Any], Callable[[str], None]]
) -> Description | str:
    try:
        result = call(source, on_text=speaker(source))
    except InputError as error:
        return str(error)
    except MmdecError:
        raise
    except Exception as error:
        return failure_message(error)
    sys.stdout.write("\n")
    return result


def _report(
    image: Any, target: Path | None, result: Description, as_json: bool, has_many_files: bool, compared: dict[str, Any]
) -> str:
    """Format the lines to print for one answer: text, or one JSON object.

    Args:
        image: Path of the picture, or a tuple of paths.
        target: The file with the answer; None: there is none.
        has_many_files: Whether there are other pictures; then the picture's name is printed.
        compared: Fields of the comparison with plain decoding, for JSON; {} without `--compare`.
    """
    names = [str(source) for source in (image if isinstance(image, tuple) else (image,))]
    if as_json:
        paths = {"input": names if isinstance(image, tuple) else names[0], "output": target and str(target)}
        return json_text({**paths, **result.to_dict(), **compared})
    title = printable(", ".join(names))
    if target is not None:
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in result.timings.items())
        return (
            f"{title} -> {printable(str(target))}\n  {result.text}\n"
            f"  {stages} s; {result.tokens_per_round:.2f} tokens per round; confidence {result.confidence:.2f}"
        )
    return f"{title}:\n  {result.text}" if has_many_files else result.text
