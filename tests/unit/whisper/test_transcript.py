"""Tests transcripts as files, and the words of timed tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdec.errors import InputError
from mmdec.whisper.transcript import Segment, Transcript, Word, cues, format_clock, reconcile_times, words_from_tokens

HELLO = [Word(" Hello,", 0.0, 0.4), Word(" you", 0.4, 0.9)]


def transcript(segments: list[Segment], text: str = "Hello, you") -> Transcript:
    return Transcript(text, "en", segments, [1, 2], 3, 1.5, {"total": 0.1})


def test_srt_and_vtt() -> None:
    made = transcript(
        [Segment(0.0, 1.5, "Hello <you> & me", []), Segment(2.0, 2.5, "", []), Segment(61.0, 3661.25, "x", [])]
    )
    assert made.format("srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello <you> & me\n\n2\n00:01:01,000 --> 01:01:01,250\nx\n"
    )
    assert made.format("vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello &lt;you&gt; &amp; me\n\n00:01:01.000 --> 01:01:01.250\nx\n"
    )


def test_json_and_text() -> None:
    made = transcript([Segment(0.0, 0.9, "Hello, you", [5], HELLO)])
    read = json.loads(made.format("json"))
    assert read == made.to_dict()
    assert read["segments"][0]["words"][0] == {"text": " Hello,", "start": 0.0, "end": 0.4}
    assert read["timings"] == {"total": 0.1}
    assert made.format() == "Hello, you\n"


def test_long_segments_are_cut_at_words() -> None:
    many = [Word(" eleven ch", 0.5 * place, 0.5 * place + 0.5) for place in range(30)]
    shown = cues([Segment(0.0, 15.0, "", [], many)])
    assert "".join(f" {cue.text}" for cue in shown) == "".join(word.text for word in many)
    assert all(len(cue.text) <= 84 and cue.end - cue.start <= 6.0 for cue in shown)
    assert len(shown) == 4
    assert cues([Segment(0.0, 9.0, "no words found", [], [])])[0].text == "no words found"


def test_subtitles_need_segments() -> None:
    with pytest.raises(InputError, match="`timestamps` must be requested"):
        transcript([]).format("srt")
    with pytest.raises(InputError, match="`format` must be one of text"):
        transcript([]).format("doc")
    assert transcript([], "").format("vtt") == "WEBVTT\n"  # nobody spoke


def test_times_are_rounded_with_carry() -> None:
    assert format_clock(59.9996) == "00:01:00.000"
    assert format_clock(-0.1, ",") == "00:00:00,000"


PIECES = {
    1: " He", 2: "llo", 3: ",", 4: " forty", 5: "-", 6: "two", 7: " (", 8: "you", 9: ")", 10: " ?",
    11: "\u4f60", 12: "\u3002", 13: " \u201c", 14: " Oh",
}  # fmt: skip


def decode(tokens: list[int]) -> str:
    if tokens[0] >= 100:  # bytes of one character
        whole = bytes([228, 189, 160])  # \u4f60
        return whole[: len(tokens)].decode("utf-8", errors="replace")
    return "".join(PIECES[token] for token in tokens)


def timed(tokens: list[int], spaced: bool = True) -> list[tuple[str, float, float]]:
    steps = [float(place) for place in range(len(tokens))]
    found = words_from_tokens(tokens, steps, [step + 1 for step in steps], decode, spaced)
    return [(word.text, word.start, word.end) for word in found]


def test_words_begin_at_spaces_and_keep_their_marks() -> None:
    assert timed([1, 2, 3, 4, 5, 6]) == [(" Hello,", 0, 3), (" forty-two", 3, 6)]
    assert timed([1, 2, 7, 8, 9, 10]) == [(" Hello", 0, 2), (" (you) ?", 3, 6)]  # marks are not spoken
    assert timed([13, 14]) == [(" \u201c Oh", 1, 2)]
    assert timed([]) == []


def test_characters_of_several_tokens_are_not_split() -> None:
    assert timed([101, 102, 103, 11, 12], spaced=False) == [("\u4f60", 0, 3), ("\u4f60\u3002", 3, 5)]
    assert timed([1, 101, 102]) == [(" He\ufffd", 0, 3)]  # the text ends within a character


def test_words_never_end_before_they_begin() -> None:
    assert words_from_tokens([1], [2.0], [1.0], decode)[0].end == 2.0


def spoken_segment(start: float, end: float, *words: Word) -> Segment:
    return Segment(start, end, "".join(word.text for word in words).strip(), [1], list(words))


def test_segments_begin_with_their_first_word_and_end_with_their_last() -> None:
    found = reconcile_times(
        [
            spoken_segment(0.2, 1.0, Word(" a", 0.0, 0.5), Word(" b", 0.6, 1.2)),
            Segment(1.0, 1.5, "", [2], []),
            spoken_segment(2.0, 2.2, Word(" c", 1.8, 2.5), Word(" d", 2.4, 2.6)),  # two words overlap, and two segments
            spoken_segment(3.0, 4.0, Word(" e", 2.5, 3.0)),
        ]
    )
    assert [(segment.start, segment.end) for segment in found] == [(0.0, 1.0), (1.0, 1.5), (1.8, 2.5), (2.5, 3.0)]
    assert [[(word.start, word.end) for word in segment.words or ()] for segment in found] == [
        [(0.0, 0.5), (0.6, 1.0)],
        [],
        [(1.8, 2.4), (2.4, 2.5)],
        [(2.5, 3.0)],
    ]
    assert [segment.tokens for segment in found] == [[1], [2], [1], [1]]


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.floats(0, 9), st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=3)),
        max_size=5,
    )
)
def test_times_that_agree_never_overlap(given_times: list[tuple[float, float, list[tuple[float, float]]]]) -> None:
    """For any model and attention."""
    segments = [spoken_segment(start, end, *(Word(" x", *word) for word in words)) for start, end, words in given_times]
    at = 0.0
    for before, after in zip(segments, reconcile_times(segments), strict=True):
        assert len(after.words or ()) == len(before.words or ())
        assert at <= after.start <= after.end
        inside = after.start
        for word in after.words or ():
            assert inside <= word.start <= word.end
            inside = word.end
        assert not after.words or (after.start, after.end) == (after.words[0].start, after.words[-1].end)
        at = after.end


def spoken(*timed: tuple[str, float, float]) -> list[Segment]:
    """One segment of these words, each with its start and end."""
    words = [Word(text, start, end) for text, start, end in timed]
    return [Segment(words[0].start, words[-1].end, "".join(word.text for word in words).strip(), [], words)]


def test_a_cue_ends_at_a_pause() -> None:
    shown = cues(spoken((" Wait", 0.0, 0.4), (" here", 0.4, 0.9), (" and", 3.0, 3.3), (" listen", 3.7, 4.0)))
    assert [(cue.start, cue.end, cue.text) for cue in shown] == [(0.0, 0.9, "Wait here"), (3.0, 4.0, "and listen")]


def test_a_cue_ends_with_a_sentence_and_a_long_one_with_a_clause() -> None:
    text = "It was the best of times. It was the worst of times, it was the age of wisdom of all that we have known, "
    text += "yes it was."
    timed = [(f" {word}", at * 0.2, at * 0.2 + 0.2) for at, word in enumerate(text.split())]
    shown = cues(spoken(*timed))
    assert [cue.text for cue in shown] == [
        "It was the best of times.",
        "It was the worst of times, it was the age of wisdom of all that we have known,",
        "yes it was.",
    ]
    short = cues(spoken((" Yes.", 0.0, 0.4), (" No.", 0.4, 0.8)))
    assert [cue.text for cue in short] == ["Yes. No."]
    quoted = cues(
        spoken(
            *[
                (f" {word}", at * 0.2, at * 0.2 + 0.2)
                for at, word in enumerate(["He", "said", "“I", "am", "not", "there", "yet.”", "And", "left"])
            ]
        )
    )
    assert [cue.text for cue in quoted] == ["He said \u201cI am not there yet.\u201d", "And left"]
