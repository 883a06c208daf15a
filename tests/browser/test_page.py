"""Tests the demo in a browser: each tab, the race, a bad file, a run that is stopped, a phone, a keyboard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from mmdec.demo import samples
from mmdec.demo.transcribe import shorten_label
from tests.support.demo_server import Server, true_english

pytestmark = pytest.mark.slow

SAMPLE = samples.french()[0]
TRUE = true_english()[SAMPLE.text]
SPEED = r"(\d+\.?\d* times (faster|slower)|as fast)"
HEARD = """() => [...document.querySelectorAll('#mm-translate-speech *')].some(
    at => at.shadowRoot || (at.tagName === 'AUDIO' && at.src))"""  # a player is drawn where there is a sound


def wait_until_finished(page: Any, tab: str) -> None:
    """Wait until the run of this tab is over."""
    page.locator(f"#mm-{tab}-results .mm-status.mm-done").wait_for()


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def result_text(page: Any, tab: str) -> str:
    """Return the text of the result."""
    return page.locator(f"#mm-{tab}-results .mm-text").inner_text()


def lanes(page: Any, tab: str) -> dict[str, str]:
    """Return the text of each lane, by its name."""
    found = page.locator(f"#mm-{tab}-results .mm-lane").all()
    return {lane.locator("h4").inner_text(): lane.locator(".mm-pieces").inner_text() for lane in found}


def assert_only_gains_are_green(page: Any, tab: str, count: int) -> list[str]:
    """Check the colours of all comparisons with the baseline, and return those of speed."""
    results = page.locator(f"#mm-{tab}-results")
    plain = results.locator(".mm-facts").first.evaluate("at => getComputedStyle(at).color")
    speeds = results.locator(".mm-speed").all()
    for at in [*speeds, *results.locator(".mm-equal").all()]:
        assert at.evaluate("at => getComputedStyle(at, '::before').content") == "none"
        green = at.evaluate("at => getComputedStyle(at).color") != plain
        assert green == at.inner_text().endswith("faster"), at.inner_text()
    labels = [at.inner_text() for at in speeds]
    assert len(labels) == count
    assert all(re.fullmatch(SPEED, label) for label in labels), labels
    return labels


def upload(page: Any, tab: str, path: Path) -> None:
    """Choose a file, and wait until the server has it."""
    source = page.locator(f"#mm-{tab}-source")
    with page.expect_response(lambda answer: answer.request.method == "POST" and "/upload" in answer.url):
        source.locator("input[type=file]").set_input_files(path)
    source.get_by_text("Drop Audio Here").wait_for(state="hidden")


def test_the_page_translates(page: Any) -> None:
    press(page, SAMPLE.text)
    page.wait_for_function(HEARD)
    wait_until_finished(page, "translate")
    assert result_text(page, "translate") in TRUE
    assert SAMPLE.text in page.locator("#mm-translate-results").inner_text()
    race = lanes(page, "translate")
    assert list(race) == ["Graph", "Graph, reranked", "Verified", "One by one"]
    assert race["Verified"] == race["One by one"]
    assert race["Verified"].strip() in TRUE
    assert page.locator("#mm-translate-results .mm-equal").all_inner_texts() == ["same pieces"]
    assert_only_gains_are_green(page, "translate", 3)
    bars = page.locator("#mm-translate-results .mm-steps").first
    assert len(bars.locator("text").all_text_contents()) == 2 * bars.locator("rect").count()
    graph = page.locator(".mm-dag")
    labels = graph.locator(".mm-on text").all_text_contents()
    assert (labels[0], labels[-1]) == ("start", "end")
    assert "".join(labels[1:-1]).replace("·", " ").strip() in TRUE
    title = graph.locator(".mm-on title").nth(1).text_content()
    assert re.search(rf"says: .*{re.escape(labels[1])} \d+ %", title)
    assert "On the chosen path." in title
    page.get_by_role("button", name="Show it again").first.click()
    assert page.locator("#mm-translate-results .mm-race.mm-go").count() == 1


def test_the_page_transcribes(page: Any) -> None:
    page.get_by_role("tab", name="Transcribe").click()
    press(page, shorten_label(samples.english()[0].text))
    wait_until_finished(page, "transcribe")
    race = lanes(page, "transcribe")
    assert list(race) == ["With drafts", "Plain decoding"]
    assert race["With drafts"] == race["Plain decoding"]
    assert result_text(page, "transcribe") == race["Plain decoding"].strip()
    assert page.locator("#mm-transcribe-results .mm-equal").inner_text() == "same text"
    (speed,) = assert_only_gains_are_green(page, "transcribe", 1)
    line = page.locator("#mm-transcribe-results [role=status]").inner_text()
    assert line == f"Done. With drafts: {speed}, same text."
    assert page.locator("#mm-transcribe-results").inner_text().count("tokens per pass") == len(race)  # one of each lane
    words = page.locator(".mm-word").all_text_contents()
    assert " ".join(words) == result_text(page, "transcribe")


def test_the_page_describes(page: Any) -> None:
    page.get_by_role("tab", name="Describe").click()
    page.get_by_role("button", name=re.compile("Street")).click()  # its picture has a name, too
    wait_until_finished(page, "describe")
    race = lanes(page, "describe")
    assert len(race) == 2
    assert list(race)[-1] == "Plain decoding"
    assert len(set(race.values())) == 1
    assert "street" in result_text(page, "describe")
    page.get_by_label("Question").fill("Name the red thing.")
    press(page, "Ask")
    page.locator(".mm-from", has_text="Name the red thing.").wait_for()
    wait_until_finished(page, "describe")
    assert result_text(page, "describe") == list(lanes(page, "describe").values())[-1].strip()
    picture = page.get_by_role("img", name=re.compile(r"street.png, 128 by 128 pixels"))
    assert picture.count() == 1
    boxes = page.get_by_role("checkbox")
    for number in range(boxes.count()):
        boxes.nth(number).check()
    press(page, "Ask")
    page.locator(".mm-others").wait_for()
    wait_until_finished(page, "describe")
    assert len(lanes(page, "describe")) == 2  # further drafters are rows of a table
    assert page.locator(".mm-others tr").count() == boxes.count() - 1
    assert page.locator("#mm-describe-results img").count() == 1


def test_a_bad_file_is_one_sentence(page: Any, tmp_path: Path) -> None:
    bad = tmp_path / "holiday.wav"
    bad.write_bytes(b"RIFF\x00\x00 this is no sound" * 40)
    upload(page, "translate", bad)
    press(page, "Translate")
    line = page.locator("#mm-translate-results .mm-error")
    line.wait_for()
    assert line.get_attribute("role") == "alert"
    message = line.inner_text()
    assert "holiday.wav" in message
    assert str(tmp_path) not in message
    assert "gradio" not in message
    assert page.locator("#mm-translate-results .mm-text").count() == 0
    page.complaints.clear()  # the browser's player cannot read it either
    press(page, SAMPLE.text)  # and the page goes on
    wait_until_finished(page, "translate")
    assert result_text(page, "translate") in TRUE


def test_stop_ends_the_decoding(page: Any, server: Server, tmp_path: Path) -> None:
    paragraph, rate = soundfile.read(samples.english()[-1].path)
    long = tmp_path / "long.wav"
    soundfile.write(long, np.concatenate([paragraph] * 3)[: 58 * rate], rate)
    page.get_by_role("tab", name="Transcribe").click()
    upload(page, "transcribe", long)
    press(page, "Transcribe")
    busy = page.locator("#mm-transcribe-results .mm-busy")
    busy.filter(has_not_text="Waiting for a free place").wait_for()  # the server has begun
    press(page, "Stop")
    page.get_by_text("Stopped.").wait_for()
    while server.ask("running"):
        page.wait_for_timeout(50)
    assert page.locator("#mm-transcribe-results .mm-lane").count() == 0


def test_a_phone_sees_the_result(phone: Any) -> None:
    press(phone, SAMPLE.text)
    wait_until_finished(phone, "translate")
    text = phone.locator("#mm-translate-results .mm-text")
    phone.wait_for_function("at => at.getBoundingClientRect().top < innerHeight", arg=text.element_handle())
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    box = phone.locator(".mm-scroll").first.bounding_box()
    assert box is not None
    assert box["width"] <= 390


def test_a_keyboard_is_enough(page: Any) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == SAMPLE.text:
            break
    else:
        raise AssertionError("the sample cannot be reached")
    page.keyboard.press("Enter")
    wait_until_finished(page, "translate")
    status = page.locator("#mm-translate-results [role=status]").inner_text()
    assert status in [f"Done. {text}" for text in TRUE]


def test_a_screen_reader_finds_names(page: Any) -> None:
    """Every button and field has a name; every drawing has one in words."""
    press(page, SAMPLE.text)
    wait_until_finished(page, "translate")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, select, svg[role=img], img')]
        .filter(at => at.offsetParent !== null || at.tagName === 'svg')
        .filter(at => at.type !== 'file' && at.type !== 'range')
        .filter(at => !(at.getAttribute('aria-label') || at.alt || at.innerText || at.title || at.labels?.length
            || at.getAttribute('aria-labelledby')))
        .filter(at => at.closest('[class^=mm-], [id^=mm-]'))
        .map(at => at.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    assert page.get_by_role("tab").all_inner_texts() == ["Translate", "Transcribe", "Describe"]


def test_waiting_and_results_are_announced(page: Any) -> None:
    """Before the server has answered; in an element that stays, for screen readers read out what changes in one."""
    held: list[Any] = []
    page.route("**/gradio_api/queue/join*", lambda route: held.append(route))  # a function that playwright can mark
    line = page.locator("#mm-translate-results [role=status]")
    line.wait_for(state="attached")
    page.evaluate("() => { document.querySelector('#mm-translate-results [role=status]').kept = true; }")
    press(page, SAMPLE.text)
    line.get_by_text("Waiting for a free place …").wait_for()
    assert line.locator(".mm-wheel").get_attribute("aria-hidden") == "true"
    assert page.evaluate("() => document.querySelector('#mm-translate-results [role=status]').kept")
    page.wait_for_timeout(200)
    held.pop().fulfill(status=503, json={"detail": "Queue is full."})
    line.get_by_role("alert").get_by_text("The server did not take this.").wait_for()
    page.unroute("**/gradio_api/queue/join*")
    press(page, SAMPLE.text)
    wait_until_finished(page, "translate")
    assert page.evaluate("() => document.querySelector('#mm-translate-results [role=status]').kept")
