"""Texts of the page: errors as one plain sentence, a model's output, its confidence, the status line."""

from __future__ import annotations

import logging
import re
from html import escape

from mmdec import InputError, MmdecError

NAMES = {  # argument of the library's errors -> its name for visitors
    "audio": "The recording",
    "samples": "The recording",
    "sample_rate": "The sample rate",
    "path": "The file",
    "image": "The picture",
    "prompt": "The question",
}
UNEXPECTED = "Something went wrong here, and it is not your doing. Please try again."
# a quoted path; visitors should see the file's name, not the server's folder
_FOLDER = re.compile(r"'[^'\n]*[/\\]([^'/\\\n]*)'")
_COMMAND = re.compile(r"with `ffmpeg [^`]*`")  # advice that does not help visitors: they do not have the server's file
_LIMIT = 400  # the most characters of a message
LONG = 90  # characters; longer texts are set in a smaller font
UNSURE_CONFIDENCE = 0.5  # a confidence below this is shown with a warning

WHEEL = '<span class="mm-wheel" aria-hidden="true"></span>'

log = logging.getLogger(__name__)


def error_sentence(error: BaseException) -> str:
    """Write an error as one line for visitors. Errors that are not mmdec's own are logged; their text is not shown."""
    if not isinstance(error, MmdecError):
        log.error("the demo failed", exc_info=error)
        return UNEXPECTED
    text = " ".join(str(error).split())
    text = _FOLDER.sub(lambda match: f"“{match.group(1)}”", text)
    text = _COMMAND.sub("to 16-bit PCM wav", text)
    for argument, name in NAMES.items():
        text = re.sub(rf"^`?{argument}`?(?= (“|must))", name, text)
    text = re.sub(r"`(\w+)`", r"\1", text)
    return text if len(text) <= _LIMIT else f"{text[: _LIMIT - 1].rstrip()}…"


def output_html(text: str) -> str:
    """Write a model's output as HTML; a long text gets a smaller font."""
    kind = "mm-text mm-long" if len(text) > LONG else "mm-text"
    return f'<p class="{kind}" lang="en">{escape(text)}</p>'


# what a calibrated confidence says
SHARE_OF_WORDS = "of 100 words that come out like this, about {percent} are right"
SHARE_OF_ANSWERS = "of 100 answers that come out like this, about {percent} are right"
TRANSLATION_QUALITY = "the likely quality, from 0 % (another sentence) to 100 % (close to a right one)"


def confidence_html(value: float | None, meaning: str | None) -> str:
    """Write a confidence, 0 to 1, in words; "" if there is none.

    Args:
        meaning: What it says, such as `SHARE_OF_WORDS`; None: it was not fitted to data with known answers.
    """
    if value is None:
        return ""
    percent = min(round(100 * value), 99)  # at most 99 %, because nothing is certain
    if meaning is None:
        share = f"Confidence {percent} %, as the model itself sees it: nobody has compared that with the truth."
    else:
        share = f"Confidence {percent} %: {meaning.format(percent=percent)}."
    if value >= UNSURE_CONFIDENCE:
        return f'<p class="mm-note">{share}</p>'
    return (
        f'<p class="mm-note mm-unsure"><strong>The model is unsure of this: it may well be wrong.</strong> {share}</p>'
    )


def require(condition: bool, text: str) -> None:
    """Check a condition. If it is false, raise InputError with this text."""
    if not condition:
        raise InputError(text)


def status(text: str, kind: str = "note") -> str:
    """Write the status line above the results as HTML.

    Screen readers announce an error at once. Other kinds are announced by the element around the line.

    Args:
        kind: "note", "busy" (with a spinner), "done" or "error".
    """
    role = ' role="alert"' if kind == "error" else ""
    mark = {"busy": WHEEL, "error": '<strong class="mm-mark">Cannot do that. </strong>'}.get(kind, "")
    return f'<p class="mm-status mm-{kind}"{role}>{mark}{escape(text)}</p>'
