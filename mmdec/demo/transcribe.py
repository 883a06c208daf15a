"""The tab that transcribes.

It shows text as it is accepted, compares the speed with that of plain decoding (the page calls this the race), and
shows words with their times. Speech from a microphone is transcribed live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

import gradio as gr
import numpy as np
from torch import Tensor

from mmdec import InputError
from mmdec.demo import samples as shipped
from mmdec.demo.background import MAX_DECODERS, Report, run_decoding
from mmdec.demo.html import SHARE_OF_WORDS, UNSURE_CONFIDENCE, confidence_html, error_sentence, output_html, status
from mmdec.demo.layout import (
    MAX_SECONDS,
    Controls,
    bind,
    intro,
    playable,
    recording,
    recording_input,
    run_and_stop,
    sample_button,
    status_line,
)
from mmdec.demo.race import compare_with_plain, milliseconds, race_html, round_listener, run_in_turn
from mmdec.drafters.built_in import AUTO
from mmdec.io.audio import SAMPLE_RATE
from mmdec.tasks.confidence import read_calibrations
from mmdec.types import Round
from mmdec.whisper.live import LiveTranscriber, StreamUpdate
from mmdec.whisper.transcribe import load_transcriber, transcribe
from mmdec.whisper.transcript import Transcript

DRAFT = (24, 6)  # nodes and depth of each drafted tree: fixed, because a learned size would change between calls
NOTE = (
    "English speech to text with a small Whisper. A drafter guesses the next tokens (pieces of words); the model "
    "checks all guesses in one pass and keeps those that it would have written itself. The text is the same as without "
    "the drafter, and takes fewer passes."
)
START = (
    "The clock starts when the sound has been encoded, which both share. Tokens per pass are those of the passes after "
    "the first, which reads the prompt."
)
ID = "mm-transcribe"


def decode(report: Report, samples: Tensor, drafter: str | None, live: bool = False) -> tuple[Transcript, list[Round]]:
    """Transcribe the recording once.

    Args:
        report: Reports to the page.
        samples: (T,) of 16 kHz.
        drafter: Name of the drafter; None: plain decoding.
        live: Show the text as it is accepted.

    Returns:
        The transcript, and its rounds.

    Raises:
        WorkStopped: Between rounds, if the visitor stopped the request.
    """
    rounds: list[Round] = []
    tokenizer = load_transcriber().tokenizer
    on_round = round_listener(report, tokenizer, rounds, "" if live else None)
    nodes = None if drafter is None else DRAFT
    result = transcribe(
        samples,
        sample_rate=SAMPLE_RATE,
        drafter=drafter,
        num_speculative_tokens=nodes,
        timestamps="word",
        on_round=on_round,
    )
    return result, rounds


def text_html(result: Transcript, reference: str = "") -> str:
    """Write the text as HTML, with the time that decoding took.

    Args:
        reference: The correct text; "": not known.
    """
    calibrated = bool(read_calibrations(load_transcriber().directory))
    truth = f'<p class="mm-note">Really said: {escape(reference)}</p>' if reference and reference != result.text else ""
    return (
        f'<div class="mm-said">{output_html(result.text)}'
        f"{confidence_html(result.confidence, SHARE_OF_WORDS if calibrated else None)}{truth}"
        f'<p class="mm-note">{result.seconds:.1f} s of English in {milliseconds(result.timings["total"])}.</p>'
        f"<details><summary>Words at their times</summary><p>{words_html(result)}</p></details></div>"
    )


def words_html(result: Transcript) -> str:
    """Write each word with its start in seconds, as HTML."""
    words = [word for segment in result.segments for word in segment.words or ()]
    return ", ".join(
        f'<span class="mm-word">{escape(word.text.strip())}</span> at {word.start:.1f} s' for word in words
    )


def work(report: Report, path: str | None) -> None:
    """Transcribe the upload at `path`, and report to the page by `report`."""
    report(status=status("Reading the recording …", "busy"), text="", race="")
    show_transcription(report, recording(path))


def sample_work(report: Report, number: int) -> None:
    """Transcribe the shipped sample with this index, and report to the page by `report`."""
    sample = shipped.english()[number]
    samples = recording(sample.path)
    report(status=status("Transcribing …", "busy"), text="", race="", source=(SAMPLE_RATE, playable(samples)))
    show_transcription(report, samples, sample.text)


def show_transcription(report: Report, samples: Tensor, reference: str = "") -> None:
    """Show the text as it is accepted.

    Then time decoding with drafts and plain decoding in turn, without showing text, because updates of the page would
    slow decoding down, and compare them (the race).

    Args:
        report: Reports to the page.
        samples: (T,) of 16 kHz.
        reference: The correct text; "": not known.
    """
    fast, _ = decode(report, samples, AUTO, live=True)
    report(text=text_html(fast, reference))
    ways = {"drafts": partial(decode, report, samples, AUTO), "plain": partial(decode, report, samples, None)}
    runs = run_in_turn(report, "Transcribed.", ways)
    drafts = ("With drafts", "Several tokens in a pass, guessed and checked.", runs["drafts"])
    lanes = compare_with_plain(load_transcriber().tokenizer, [drafts], runs["plain"])
    report(
        status=status(f"Done. {lanes[0].name}: {lanes[0].verdict}.", "done"),
        race=race_html(lanes, "tokens", start=START),
    )


def warm_up() -> None:
    """Load the model and run it once in each way of decoding."""
    for sample in shipped.english()[:1]:
        for drafter, nodes in ((AUTO, DRAFT), (None, None)):
            transcribe(sample.path, drafter=drafter, num_speculative_tokens=nodes, timestamps="word")


def tab() -> None:
    """Add this tab to the page."""
    with gr.Tab("Transcribe", id="transcribe"):
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300):
                intro("English speech to text", NOTE)
                with gr.Row(elem_classes="mm-samples"):
                    buttons = [sample_button(shorten_label(sample.text)) for sample in shipped.english()]
                source = recording_input(ID, "English")
                run, stop = run_and_stop(ID, "Transcribe")
                microphone(ID)
            with gr.Column(scale=3, min_width=300, elem_id=f"{ID}-results"):
                line = status_line("Press a sample, or record something and press Transcribe.")
                text = gr.HTML()
                race = gr.HTML()
        outputs: dict[str, Any] = {"status": line, "text": text, "race": race, "source": source}
        bind(ID, Controls(buttons, run, stop, [source]), outputs, work, sample_work)


def shorten_label(text: str) -> str:
    """Cut a button's label to at most 60 letters."""
    return text if len(text) <= 60 else f"{text[:58].rstrip()} …"


PIECE = 0.5  # seconds of sound that the browser sends at once
READY = "Press Record and speak English. Text is grey until a pause makes it final."
LISTENING = "Listening. What you said last may still change."
# text with a lower confidence is not shown; a hum has 0.10, music 0.04, two clear words 0.15
MIN_SHOWN_CONFIDENCE = 0.12
NO_SPEECH_NOTE = '<p class="mm-note mm-unsure">The sound is not speech, or not in a language of this model.</p>'
ENDED = "The recording has ended. All of the text is final."

Sound = tuple[int, np.ndarray]  # rate in Hz, samples (T,) or (T, channels)


@dataclass
class LiveRecording:
    """One visitor's recording: its transcriber, its final texts, and the text that may still change."""

    live: LiveTranscriber
    final: list[str] = field(default_factory=list[str])  # the final texts so far, as HTML
    provisional: str = ""  # text that may still change
    ended: bool = False  # whether `live` was ended

    def add(self, updates: Iterable[StreamUpdate]) -> None:
        """Add updates of the transcriber.

        Final text of low confidence is replaced by a note; provisional text is hidden.
        """
        for update in updates:
            is_confident = (update.transcript.confidence or 0.0) >= MIN_SHOWN_CONFIDENCE
            self.provisional = update.text if is_confident and not update.final else ""
            if update.final and update.text:
                shown = _final(update.transcript) if is_confident else NO_SPEECH_NOTE
                self.final += [shown] if self.final[-1:] != [NO_SPEECH_NOTE] or is_confident else []

    @property
    def html(self) -> str:
        """Write all text so far as HTML."""
        so_far = f'<p class="mm-note" lang="en">{escape(self.provisional)}</p>' if self.provisional else ""
        return "".join(self.final) + so_far


def _final(result: Transcript) -> str:
    low = (result.confidence or 0.0) < UNSURE_CONFIDENCE
    return output_html(result.text) + (
        confidence_html(result.confidence, SHARE_OF_WORDS if result.calibrated else None) if low else ""
    )


def transcribe_piece(sound: Sound | None, talk: LiveRecording | None) -> tuple[str, str, LiveRecording | None]:
    """Transcribe a piece of sound from the microphone.

    Args:
        sound: (rate in Hz, samples); None: nothing arrived.
        talk: The recording so far; None: this is its first piece.

    Returns:
        The status line and the text, both as HTML, and the recording so far; None after an error.
    """
    try:
        if sound is None:
            return status(LISTENING, "busy"), "" if talk is None else talk.html, talk
        talk = talk or LiveRecording(LiveTranscriber(sample_rate=sound[0], model=load_transcriber()))
        if talk.ended:
            return status(ENDED, "done"), talk.html, talk
        run_decoding(talk.add, talk.live.feed(sound[1]))
    except InputError as error:
        return status(error_sentence(error), "error"), "" if talk is None else talk.html, None
    if talk.live.seconds >= MAX_SECONDS:  # the demo's limit is reached: later sound is ignored
        return *end_recording(talk)[:2], talk
    return status(LISTENING, "busy"), talk.html, talk


def end_recording(talk: LiveRecording | None) -> tuple[str, str, None]:
    """End a recording: decode the sound that is left.

    Returns:
        The status line and the text, both as HTML, and None, so that the next recording starts afresh.
    """
    if talk is None:
        return status(READY), "", None
    if not talk.ended:
        run_decoding(talk.add, talk.live.end())
        talk.ended = True
    return status(ENDED, "done"), talk.html, None


def microphone(tab: str) -> None:
    """Add the microphone, its status and its text.

    Args:
        tab: Prefix of its elements' ids.
    """
    gr.HTML("<h3>Or speak, and read along</h3>")
    source: Any = gr.Audio(
        sources=["microphone"], type="numpy", streaming=True, elem_id=f"{tab}-live", label=f"Up to {MAX_SECONDS:g} s"
    )
    line, text, talk = status_line(READY), gr.HTML(), gr.State(None)
    common: dict[str, Any] = {
        "outputs": [line, text, talk],
        "concurrency_id": "decoding",
        "concurrency_limit": MAX_DECODERS,
        "show_progress": "hidden",
        "api_visibility": "private",
    }
    source.stream(transcribe_piece, [source, talk], stream_every=PIECE, time_limit=2 * MAX_SECONDS, **common)
    source.stop_recording(end_recording, [talk], **common)
