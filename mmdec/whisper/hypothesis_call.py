"""`mmdec.hypothesis`: a text, or a faster recogniser, as the draft of a whole answer."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import MODEL_FOR_CTC_MAPPING, AutoProcessor, PreTrainedModel, ProcessorMixin

from mmdec.checks.arguments import format_value
from mmdec.checks.devices import check_device
from mmdec.checks.files import quote_path, read_text
from mmdec.checks.weights import report_damage
from mmdec.drafters.hypothesis import Script, clean_text
from mmdec.errors import InputError
from mmdec.generation.hypothesis_source import Hypothesis, Listen
from mmdec.generation.model_lock import reading
from mmdec.hub.find import HUB_FILES, HUB_ID, SHORT_NAMES, TOKENIZER_FILES, find_model, shipped_names
from mmdec.io.audio import SAMPLE_RATE
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.pretrained.language_model import config_class, read_pretrained
from mmdec.whisper.checkpoint import LoadedWhisper
from mmdec.whisper.transcribe import transcribe

TEXT_SUFFIXES = (".srt", ".vtt", ".txt")  # of the files that are read; the first that exists is a recording's text
MAX_TEXT_BYTES = 2**24  # maximum size of a file
# a CTC model reads at most this much sound at once, because its attention grows with the square
CTC_WINDOW_SECONDS = 30
CUE_TIME = re.compile(r"(?:(\d+):)?(\d+):(\d+)[.,](\d+)\s*-->")
CUE_MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")
Text: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = "Text | Sequence[Text] | PreTrainedModel | LoadedWhisper | LoadedAudioLm | Callable[[Any], str]"


def hypothesis(
    source: Source,
    *,
    processor: Any = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
) -> Hypothesis:
    """Make a drafter of a text that the answer may resemble: the draft of the whole answer.

    Pass it as `drafter` to `transcribe`, `describe`, `generate`, `stream` or `speculate`. Words are compared in lower
    case without punctuation. A text that differs, in a few words or in all, costs time and never changes the answer.

    Args:
        source: A text. Or the path of a .txt file, or of subtitles (.srt, .vtt), whose times help to find the place of
            pieces cut at pauses. Or a list of texts and paths, one for each recording, picture or prompt of the call.
            Or, for `transcribe`, a recogniser that transcribes the recording first: the name, folder or
            Hugging Face id of a Whisper, of an audio language model or of a CTC model of transformers; such a loaded
            model, with its `processor`; or a function of samples (float32, 16 kHz, one channel), which returns the
            text.
        processor: The processor of a loaded model; None otherwise.
        tokenizer: The tokenizer of the model that is drafted for. Default None: the one in its folder.
        device: Where a model given by name runs. Default None: a GPU if there is one, else the CPU.

    Returns:
        The drafter.

    Raises:
        InputError: For another source, a file that cannot be read, and a model that is damaged or no recogniser.
    """
    given: Any = source
    if isinstance(given, (list, tuple)):
        if not given or not all(isinstance(text, (str, os.PathLike)) for text in given):
            raise InputError(
                f"`source` must hold texts or the names of files, one for each input, but is {format_value(given)}. "
                "Give a list of strings."
            )
        return Hypothesis(tuple(_script(text) for text in given), is_list=True, tokenizer=tokenizer)
    if isinstance(given, (str, os.PathLike)) and not _is_model(given):
        return Hypothesis((_script(given),), tokenizer=tokenizer)
    if isinstance(given, (str, os.PathLike)):
        listen = _named_recogniser(given, device)
        return Hypothesis((), listen=listen, source=Path(given).name, tokenizer=tokenizer)
    if isinstance(given, (LoadedWhisper, LoadedAudioLm)):
        return Hypothesis((), listen=partial(_transcribe, given, None), source="model", tokenizer=tokenizer)
    if isinstance(given, PreTrainedModel):
        if not isinstance(processor, ProcessorMixin):
            raise InputError(
                f"`processor` must be that of the loaded model, but is {format_value(processor)}. Load it with "
                "`AutoProcessor.from_pretrained`."
            )
        is_ctc = type(given) in MODEL_FOR_CTC_MAPPING.values()
        listen = partial(_transcribe_by_ctc if is_ctc else _transcribe, given, processor)
        return Hypothesis((), listen=listen, source=type(given).__name__, tokenizer=tokenizer)
    if callable(given):
        return Hypothesis(
            (), listen=partial(_call, cast(Callable[[Any], str], given)), source="function", tokenizer=tokenizer
        )
    raise InputError(
        f"`source` must be a text, the name of a file or of a model, a list of texts, a model or a function, but is "
        f"{format_value(given)}. Give the text."
    )


def _is_model(source: str | os.PathLike[str]) -> bool:
    """Return whether a string or a path names a model: a folder, a shipped name or a Hugging Face id."""
    if not isinstance(source, str):
        return Path(source).suffix.lower() not in TEXT_SUFFIXES
    if Path(source).suffix.lower() in TEXT_SUFFIXES or any(map(str.isspace, source)):
        return False
    named = source in shipped_names(None) or any(pattern.fullmatch(source) for pattern in SHORT_NAMES)
    return named or HUB_ID.fullmatch(source) is not None or is_folder(source)


def is_folder(source: str) -> bool:
    """Return whether a string, possibly no name at all, is that of a folder."""
    try:
        return os.path.isdir(source)
    except ValueError:  # for a surrogate
        return False


def _script(source: str | os.PathLike[str]) -> Script:
    """Read a text, or a file of text."""
    name = os.fspath(source)
    is_file = isinstance(source, os.PathLike) or (
        Path(name).suffix.lower() in TEXT_SUFFIXES and len(name.splitlines()) == 1
    )
    return read_text_file(Path(name)) if is_file else Script(clean_text(name))


def read_text_file(path: Path) -> Script:
    """Read a text (.txt), or subtitles (.srt, .vtt) with their times.

    Raises:
        InputError: If the file is too large, of another kind, not UTF-8, or has no subtitles.
    """
    suffix = path.suffix.lower()
    if suffix not in TEXT_SUFFIXES:
        raise InputError(
            f"`source` must be a file that ends with {', '.join(TEXT_SUFFIXES)}, but is '{quote_path(path)}'. Rename "
            "it."
        )
    text = read_text(path, "source", MAX_TEXT_BYTES)
    if suffix == ".txt":
        return Script(clean_text(text))
    script = read_subtitles(text)
    if not len(script):
        raise InputError(f"`source` must hold subtitles, but '{quote_path(path)}' has none. Give another file.")
    return script


def text_for(recording: Path, folder: Path) -> Path:
    """Return the file in a folder of texts that has a recording's name.

    Raises:
        InputError: If there is none.
    """
    names = [folder / f"{recording.stem}{suffix}" for suffix in TEXT_SUFFIXES]
    text = next((name for name in names if name.is_file()), None)
    if text is None:
        raise InputError(
            f"`draft_text` must have a text of '{quote_path(recording)}', but '{quote_path(names[-1])}' does not "
            "exist. Write it, or leave the recording out."
        )
    return text


def read_subtitles(text: str) -> Script:
    """Read subtitles in SubRip or WebVTT format; what is outside of them, and markup in them, is left out."""
    parts, starts_at = list[str](), list[tuple[int, float]]()
    length, seconds = 0, None
    for line in text.splitlines():
        time = CUE_TIME.search(line)
        if time is not None:
            hours, minutes, second, fraction = time.groups()
            seconds = int(hours or 0) * 3600 + int(minutes) * 60 + int(second) + float(f"0.{fraction}")
        elif not line.strip():
            seconds = None
        elif seconds is not None:
            words = clean_text(html.unescape(CUE_MARKUP.sub("", line))).strip()
            if words and words not in parts[-1:]:  # a line that rolls up stands in two subtitles
                starts_at.append((length, max(seconds, starts_at[-1][1] if starts_at else 0.0)))
                parts.append(words)
                length += len(words) + 1
    return Script(" ".join(parts), starts_at)


def _named_recogniser(source: str | os.PathLike[str], device: str | torch.device | None) -> Listen:
    """Load a recogniser by its name."""
    folder = find_model(source, None, (*HUB_FILES, *TOKENIZER_FILES))
    kind = config_class(folder)
    if kind is None or kind not in MODEL_FOR_CTC_MAPPING:
        return partial(_transcribe_by_name, source, device)
    model: Any = read_pretrained(folder, kind, MODEL_FOR_CTC_MAPPING[kind], "CTC model", "source")
    model.to(check_device(device))
    with report_damage(f"`source` must have a whole processor, but that in '{folder}' is damaged"):
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return partial(_transcribe_by_ctc, model, processor)


def _call(function: Callable[[Any], str], samples: Tensor) -> str:
    text = function(samples.numpy())
    if not isinstance(text, str):
        raise TypeError(f"the function returned {format_value(text)} instead of a text")
    return text


def _transcribe_by_name(name: str | os.PathLike[str], device: str | torch.device | None, samples: Tensor) -> str:
    return transcribe(samples, sample_rate=SAMPLE_RATE, model=name, device=device).text


def _transcribe(model: Any, processor: Any, samples: Tensor) -> str:
    return transcribe(samples, sample_rate=SAMPLE_RATE, model=model, processor=processor).text


@torch.inference_mode()
def _transcribe_by_ctc(model: Any, processor: Any, samples: Tensor) -> str:
    """Transcribe samples (T,) with a CTC model of transformers: the likeliest symbol of each frame."""
    texts = list[str]()
    with reading(model):
        for part in samples.split(CTC_WINDOW_SECONDS * SAMPLE_RATE):
            inputs = processor(part.numpy(), sampling_rate=SAMPLE_RATE, return_tensors="pt")
            logits = model(**inputs.to(model.device)).logits
            texts.append(processor.batch_decode(logits.argmax(-1))[0])
    return " ".join(texts)
