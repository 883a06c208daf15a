"""A microphone that is transcribed while somebody speaks: provisional text, which becomes final at a pause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr
import numpy as np

from mmdec import InputError
from mmdec.demo.background import DECODERS
from mmdec.demo.layout import MAX_SECONDS, status_line
from mmdec.demo.sentences import UNSURE, confidence, said, sentence, status
from mmdec.pipelines.transcription.live import LiveTranscriber, StreamUpdate
from mmdec.pipelines.transcription.transcribe import load_transcriber
from mmdec.pipelines.transcription.transcript import Transcript

PIECE = 0.5  # seconds of sound that the browser sends at once
READY = "Press Record and speak English. Text is grey until a pause makes it final."
LISTENING = "Listening. What you said last may still change."
UNDERSTOOD = 0.2  # the least confidence of text that is shown: music and noise come out as words below 0.1
STRANGE = '<p class="mm-note mm-unsure">Something was heard that is no speech, or that this model does not know.</p>'
ENDED = "The recording has ended. All of the text is final."

Sound = tuple[int, np.ndarray]  # rate in Hz, samples (T,) or (T, channels)


@dataclass
class Talk:
    """One visitor's recording: its transcriber, its final texts, and the text that may still change."""

    live: LiveTranscriber
    final: list[str] = field(default_factory=list[str])  # HTML
    provisional: str = ""
    ended: bool = False

    def add(self, updates: Iterable[StreamUpdate]) -> None:
        """Take what was understood."""
        for update in updates:
            sure = update.transcript.confidence >= UNDERSTOOD
            self.provisional = update.text if sure and not update.final else ""
            if update.final and update.text:
                shown = _final(update.transcript) if sure else STRANGE
                self.final += [shown] if self.final[-1:] != [STRANGE] or sure else []

    @property
    def html(self) -> str:
        """All text so far."""
        so_far = f'<p class="mm-note" lang="en">{escape(self.provisional)}</p>' if self.provisional else ""
        return "".join(self.final) + so_far


def _final(result: Transcript) -> str:
    """A final text, with its confidence where that is low."""
    low = result.confidence < UNSURE
    return said(result.text) + (confidence(result.confidence, "words", result.calibrated) if low else "")


def heard(sound: Sound | None, talk: Talk | None) -> tuple[str, str, Talk | None]:
    """A piece of sound arrived. talk: None for a recording's first one. Returns the status, the text, and the talk;
    None after an error."""
    try:
        if sound is None:
            return status(LISTENING, "busy"), "" if talk is None else talk.html, talk
        talk = talk or Talk(LiveTranscriber(sample_rate=sound[0], model=load_transcriber()))
        if talk.ended:
            return status(ENDED, "done"), talk.html, talk
        talk.add(talk.live.feed(sound[1]))
    except InputError as error:
        return status(sentence(error), "error"), "" if talk is None else talk.html, None
    if talk.live.seconds >= MAX_SECONDS:  # what is said from now on is not heard
        return *ended(talk)[:2], talk
    return status(LISTENING, "busy"), talk.html, talk


def ended(talk: Talk | None) -> tuple[str, str, None]:
    """The recording ended. Returns the status, the text, and no talk."""
    if talk is None:
        return status(READY), "", None
    if not talk.ended:
        talk.add(talk.live.end())
        talk.ended = True
    return status(ENDED, "done"), talk.html, None


def microphone(tab: str) -> None:
    """Add the microphone, its status and its text. tab: prefix of its elements' ids."""
    gr.HTML("<h3>Or speak, and read along</h3>")
    source: Any = gr.Audio(
        sources=["microphone"], type="numpy", streaming=True, elem_id=f"{tab}-live", label=f"Up to {MAX_SECONDS:g} s"
    )
    line, text, talk = status_line(READY), gr.HTML(), gr.State(None)
    common: dict[str, Any] = {
        "outputs": [line, text, talk],
        "concurrency_id": "decoding",
        "concurrency_limit": DECODERS,
        "show_progress": "hidden",
        "api_visibility": "private",
    }
    source.stream(heard, [source, talk], stream_every=PIECE, time_limit=2 * MAX_SECONDS, **common)
    source.stop_recording(ended, [talk], **common)
