"""The options of `mmdec eval asr` and `mmdec eval vlm`. They need no torch: the help of the command line reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from mmdec.checks.arguments import check_threads, check_whole
from mmdec.drafters.built_in import AUTO
from mmdec.tasks.options import MAX_BATCH, option
from mmdec.training.corpora.text_files import check_limit


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """The options that evaluations and benchmarks share."""

    plan: str = option(
        "learned", "Draft size: learned, 8 (a chain of 8 tokens), or 16x6 (a tree of 16 tokens, at most 6 deep).", str
    )
    allow_absolute_paths: bool = option(
        False, "Lists may name absolute paths, and links may lead out of the corpus.", bool, name="--allow-absolute"
    )
    device: str = option("cpu", "cpu or cuda.", str)
    threads: int = option(2, "CPU threads.", int, metavar="N", minimum=1)

    def __post_init__(self) -> None:
        check_threads(self.threads)


@final
@dataclass(frozen=True, kw_only=True)
class AsrEvalOptions(MeasurementOptions):
    """What a Whisper is scored on, and how."""

    split: str = option("test", "Split of the corpus: test, test_voices, paragraphs or dev; '' for all.", str)
    corpus: str | os.PathLike[str] = option(
        Path("data/english"), "A folder in LibriSpeech's layout, or a .tsv or .jsonl with path and text.", Path
    )
    audio: Sequence[str | os.PathLike[str]] = option(
        (), "A recording of your own, its transcript next to it (.txt). Repeat.", list[Path], metavar="FILE"
    )
    heads: str | os.PathLike[str] | None = option(
        None, "A folder with Medusa heads. Default: the model's own.", Path | None
    )
    plain: bool = option(True, "Compare with transformers' greedy decoding, too.", bool, name="--plain/--no-plain")
    language: str = option("en", "Language of the recordings; auto detects it.", str)
    batch_size: int = option(1, "Recordings in a batch.", int, minimum=1)
    limit: int | None = option(
        None, "Use only this many utterances, evenly spaced over the split.", int | None, metavar="N", minimum=1
    )
    max_new_tokens: int | None = option(None, "Maximum number of new tokens in a 30 s window.", int | None, minimum=1)
    worst: int = option(10, "List this many transcripts with most errors.", int, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("batch_size", self.batch_size, 1, MAX_BATCH, "1 decodes one by one.")
        check_limit(self.limit)


@final
@dataclass(frozen=True, kw_only=True)
class VlmEvalOptions(MeasurementOptions):
    """What a vision-language model is asked, and how."""

    questions: str | os.PathLike[str] | None = option(
        None,
        "What is asked: a .jsonl with image, question and optionally answer; a table like samples.tsv of "
        "data/samples/images; the file of TextVQA, VQAv2, LLaVA-Bench or MMSpec; or conversations. Default: about the "
        "sample pictures; with only --images, --prompt about each of them.",
        Path | None,
    )
    images: str | os.PathLike[str] | None = option(
        None,
        "Folder of the pictures, or one picture. Default: next to the questions, or in images/ there.",
        Path | None,
    )
    prompt: str = option(
        "Describe this image.", "What is asked about --images without a file of questions.", str, short="-p"
    )
    drafter: str = option(AUTO, "As for `mmdec describe`.", str, short="-d")
    swap: bool = option(
        False,
        "Show each question another picture of its task. Answers that are still right come from the text alone.",
        bool,
    )
    limit: int | None = option(
        None, "Use this many questions of each task, at equal distances in the list.", int | None, minimum=1
    )
    max_new_tokens: int | None = option(None, "Maximum number of new tokens of an answer.", int | None, minimum=1)
    batch_size: int = option(1, "Questions in a batch.", int, minimum=1)
    worst: int = option(10, "List this many wrong answers.", int, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("batch_size", self.batch_size, 1, MAX_BATCH, "1 asks one by one.")
        check_limit(self.limit)
