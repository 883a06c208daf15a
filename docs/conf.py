"""Settings of Sphinx: pages in Markdown (MyST), and an API reference from the docstrings, which are plain text."""

from __future__ import annotations

import inspect
import io
import re
import sys
import tokenize
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import mmdec
from mmdec import __version__
from mmdec.daspeech.options import TranslateOptions
from mmdec.tasks.options import option_help, options_of
from mmdec.vision.options import DescribeOptions
from mmdec.whisper.options import TranscribeOptions

project = "mmdec"
author = copyright = "the mmdec authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["examples"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "mmdec"
html_static_path: list[str] = []
html_show_sourcelink = False
html_theme_options = {"footer_icons": []}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False  # calls take their options from dataclasses, not from their source
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
# Not warnings: a signature may name a type that has no page of its own, and Markdown is coloured as far as it can be.
suppress_warnings = ["misc.highlighting_failure"]
OPTIONS: dict[Any, Any] = {
    mmdec.transcribe: TranscribeOptions,
    mmdec.translate_speech: TranslateOptions,
    mmdec.describe: DescribeOptions,
}


def fields_with_comments(cls: type) -> list[tuple[str, str]]:
    """A dataclass's fields, and what the comment after each says: its shape, its unit."""
    body = inspect.cleandoc("\n" + inspect.getsource(cls))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(body).readline)
        if token.type == tokenize.COMMENT
    }
    found = []
    for number, line in enumerate(body.splitlines(), 1):
        field = re.match(r"    (\w+): ", line)
        if field and not field[1].startswith("_"):
            found.append((field[1], comments.get(number, "")))
    return found


def as_rest(lines: list[str]) -> list[str]:
    """Plain text as reStructuredText: names in backticks are code, indented paragraphs stay as they are."""
    result: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", "\n".join(lines)):
        rows = paragraph.strip("\n").splitlines()
        if any(row.startswith(" ") for row in rows):
            result += ["::", "", *(f"    {row}" for row in rows), ""]
            continue
        pieces = re.split(r"(`[^`]+`)", "\n".join(rows))
        plain = [f"`{piece}`" if piece.startswith("`") else re.sub(r"([*|_\\`])", r"\\\1", piece) for piece in pieces]
        result += [*"".join(plain).splitlines(), ""]
    return result


def plain_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Called by autodoc for each docstring."""
    lines[:] = as_rest(lines)
    if what == "class" and is_dataclass(thing):
        for field, comment in fields_with_comments(thing):
            text = as_rest([comment])[0] if comment else ""
            lines.append(f"- ``{field}``" + (f": {text}" if text else ""))
        lines.append("")
    if thing in OPTIONS:
        lines += [
            ".. list-table:: Options",
            "   :header-rows: 1",
            "",
            "   * - option",
            "     - default",
            "     - meaning",
        ]
        for one in options_of(OPTIONS[thing]):
            meaning = as_rest([option_help(OPTIONS[thing], one.name)])[0]
            lines += [f"   * - ``{one.name}``", f"     - ``{one.default!r}``", f"     - {meaning}"]
        lines.append("")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)
