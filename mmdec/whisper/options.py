"""The options of `mmdec.transcribe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from mmdec.checks.arguments import check_callable, check_switch, check_whole
from mmdec.drafters.built_in import AUTO, FALLBACK_DRAFTER, built_in_names
from mmdec.tasks.options import MAX_BATCH, STRICT_HELP, GenerateOptions, option

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

    from mmdec.generation.drafter_choice import DrafterChoice
    from mmdec.pretrained.audio_lm import LoadedAudioLm
    from mmdec.whisper.checkpoint import LoadedWhisper
    from mmdec.whisper.transcript import Transcript


DEFAULT_WHISPER = "whisper-tiny.en"
Model: TypeAlias = "str | os.PathLike[str] | PreTrainedModel | LoadedWhisper | LoadedAudioLm"
Timestamps = Literal["segment", "word"] | None
Progress = Callable[[float, float], None]  # called with (seconds of audio done, seconds of audio in total)
OnTranscript: TypeAlias = "Callable[[int, Transcript], None]"


@final
@dataclass(frozen=True, kw_only=True)
class TranscribeOptions(GenerateOptions):
    """The options of `mmdec.transcribe`, checked as far as that needs no model."""

    sample_rate: int | None = option(None, "Hz of samples; files name it themselves.")
    model: Model = option(DEFAULT_WHISPER, "A shipped name, a folder, a Hugging Face id, or a loaded model.")
    drafter: DrafterChoice = option(
        AUTO,
        f"{AUTO} (one made for the model, else {FALLBACK_DRAFTER}), "
        f"{', '.join(built_in_names('ready', 'speech_weights'))} or another registered name; a folder with a "
        "drafter's weights; a class as package.module:Class; or none (no drafts).",
        str,
        short="-d",
    )
    timestamps: Timestamps = option(
        None, "segment or word. Default: segment for subtitles, else none.", str | None, short="-t"
    )
    language: str | Sequence[str] | None = option(None, "A name or a code. Default: detected.", str | None, short="-l")
    task: str | None = option("transcribe", "transcribe, or translate (into English).", str)
    prompt: str | None = option(None, "Text before the recording: gives names and spelling.", str | None)
    batch_size: int = option(8, "Recordings transcribed at a time.", int, metavar="N", minimum=1)
    cut_at_pauses: bool = option(
        False,
        "Cut long recordings at pauses, and transcribe the pieces of all recordings side by side, --batch-size at a "
        "time: they share passes of the decoder. The stock model's windows are others.",
        bool,
    )
    strict: bool = option(False, STRICT_HELP, bool)
    progress: Progress | None = option(None, "Called with the seconds of audio done and in total.")
    on_transcript: OnTranscript | None = option(None, "Called with the index and transcript of each recording.")

    def __post_init__(self) -> None:
        batch_size = check_whole("batch_size", self.batch_size, 1, MAX_BATCH, "Leave it out for 8.")
        super().__post_init__()
        check_callable("progress", self.progress, "a function of the seconds done and all seconds")
        check_callable("on_transcript", self.on_transcript, "a function of an index and a transcript")
        self._set(
            batch_size=batch_size,
            cut_at_pauses=check_switch("cut_at_pauses", self.cut_at_pauses),
            strict=check_switch("strict", self.strict),
        )
