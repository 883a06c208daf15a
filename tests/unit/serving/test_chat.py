"""Tests `/v1/chat/completions`: answers equal those of the public call, whole and streamed; and refused requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

import mmdec
from mmdec.serving.answers import TextDeltas
from mmdec.serving.server import ServerLimits
from tests.support.pictures import QUESTION, pixels
from tests.support.running_servers import events, picture, served


@pytest.fixture(scope="module")
def client(engines: dict[str, Any]) -> Iterator[httpx.Client]:
    with served(engines) as (client, _):
        yield client


def ask(client: httpx.Client, *content: Any, **options: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(content)}]
    return client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **options})


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_an_answer_is_that_of_the_call(client: httpx.Client, folder: Path) -> None:
    wanted = mmdec.describe(pixels(6), QUESTION, model=folder / "pictures", max_new_tokens=20)
    answer = ask(client, picture(pixels(6)), text(QUESTION), max_tokens=20).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == wanted.text
    assert choice["finish_reason"] == ("length" if len(wanted.tokens) == 20 else "stop")
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(wanted.tokens)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(wanted.tokens)
    assert (answer["object"], answer["model"]) == ("chat.completion", "pictures")


def test_a_streamed_answer_adds_up(client: httpx.Client, folder: Path) -> None:
    wanted = mmdec.describe((), "It is 09:30.", model=folder / "pictures", max_new_tokens=30)
    options = {"max_completion_tokens": 30, "stream": True, "stream_options": {"include_usage": True}}
    first, *deltas, last, usage = events(ask(client, text("It is 09:30."), **options).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"]["content"] for each in deltas) == wanted.text
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert usage["usage"]["completion_tokens"] == len(wanted.tokens)
    assert len({each["id"] for each in (first, *deltas, last, usage)}) == 1


def test_several_turns_and_pictures_are_one_dialogue(client: httpx.Client, engines: dict[str, Any]) -> None:
    """The answer is that of `model.generate` on what the processor makes of it."""
    vlm, shown = engines["pictures"].vlm, [pixels(1), pixels(2)]
    words = [QUESTION, "A star.", "And here?"]
    messages = [
        {"role": "user", "content": [picture(shown[0]), text(words[0])]},
        {"role": "assistant", "content": words[1]},
        {"role": "user", "content": [text(words[2]), picture(shown[1])]},
    ]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    image = {"type": "image"}
    turns = [
        {"role": "user", "content": [image, text(words[0])]},
        {"role": "assistant", "content": [text(words[1])]},
        {"role": "user", "content": [text(words[2]), image]},
    ]
    written = vlm.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    special = not written.startswith(vlm.tokenizer.bos_token or "\0")
    inputs = vlm.processor(images=shown, text=written, return_tensors="pt", add_special_tokens=special)
    out = vlm.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    assert answer["choices"][0]["message"]["content"] == vlm.tokenizer.decode(new, skip_special_tokens=True).strip()
    assert answer["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]


def test_a_seed_repeats_a_sample(client: httpx.Client) -> None:
    replies = [
        ask(client, text(QUESTION), temperature=1.5, top_p=0.9, seed=seed, max_tokens=16).json()
        for seed in (1, 1, 2, 3)
    ]
    texts = [each["choices"][0]["message"]["content"] for each in replies]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_what_asks_for_a_sample_needs_no_temperature(
    client: httpx.Client, engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(seed: int, **options: Any) -> str:
        answer = ask(client, text(QUESTION), temperature=None, seed=seed, max_tokens=16, **options).json()
        return answer["choices"][0]["message"]["content"]

    assert reply(1, top_p=0.99) == reply(1, top_p=0.99)
    assert len({reply(seed, top_p=0.99) for seed in range(8)}) > 1
    monkeypatch.setattr(engines["pictures"].vlm.model.generation_config, "do_sample", True)
    assert len({reply(1) for _ in range(8)}) == 1
    assert len({reply(seed) for seed in range(8)}) > 1


def test_a_stop_ends_the_text_before_it(client: httpx.Client) -> None:
    whole = ask(client, text(QUESTION), max_tokens=30).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    wanted = whole[: whole.index(stop)]
    answer = ask(client, text(QUESTION), max_tokens=30, stop=[stop]).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (wanted, "stop")
    streamed = events(ask(client, text(QUESTION), max_tokens=30, stop=stop, stream=True).text)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in streamed).strip() == wanted.strip()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
        {"messages": [{"role": "user", "content": "x"}], "n": 2},
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
        {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
        {"messages": [{"role": "user", "content": "word " * 20000}]},
        {},
        [],
    ],
)
def test_unknown_fields_are_refused(client: httpx.Client, body: Any) -> None:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/secret.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/png;base64,%%%%",
        "data:image/png;base64,AAAA",
        "data:text/html;base64,AAAA",
        "",
    ],
)
def test_only_attached_pictures_are_read(client: httpx.Client, url: str) -> None:
    answer = ask(client, {"type": "image_url", "image_url": {"url": url}}, text(QUESTION))
    assert answer.status_code == 400
    assert "root:" not in answer.text


def test_a_picture_s_address_is_read_as_browsers_read_it(client: httpx.Client) -> None:
    url = picture(pixels(6))["image_url"]["url"]
    data = url.partition(",")[2]
    raw = "".join(f"%{byte:02X}" for byte in base64.b64decode(data))
    lines = "\r\n".join(data[at : at + 76] for at in range(0, len(data), 76))
    urls = [
        url,
        f"data:image/png;charset=utf-8;base64,{data}",
        f"DATA:IMAGE/PNG;BASE64,{data}",
        f"data:image/png;base64,{lines}\n",
        f"data:image/png;base64,{data.rstrip('=')}",
        f"data:image/png;base64,{quote(data, safe='')}",
        f" data:image/png;name=a.png;base64,{data}",
        f"data:image/png,{raw}",
    ]
    shown = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    replies = [ask(client, each, text(QUESTION), max_tokens=8) for each in shown]
    assert [each.status_code for each in replies] == [200] * len(urls)
    assert len({each.json()["choices"][0]["message"]["content"] for each in replies}) == 1


def test_a_question_about_html_and_every_later_turn_are_answered(client: httpx.Client) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You know <image> and </s>."}]
    for words in ("What is <image>?", "And <s>?"):
        messages.append({"role": "user", "content": words})
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"] | {"content": "It is <image>."})


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_text_is_noted(client: httpx.Client, stream: bool) -> None:
    def reason(**options: Any) -> str:
        answer = ask(client, text(QUESTION), stream=stream, **options)
        return (events(answer.text)[-1] if stream else answer.json())["choices"][0]["finish_reason"]

    reply = ask(client, text(QUESTION), max_tokens=30).json()["choices"][0]["message"]["content"]
    assert reason(max_tokens=30, stop=[reply[-2:]]) == "stop"
    assert reason(max_tokens=2) == "length"
    assert reason(max_tokens=30, stop=[reply[1:3]]) == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_answer_carries_a_note(engines: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.serving.completions.CUT_CONFIDENCE", 0.0)

    def answer(**options: Any) -> dict[str, Any]:
        response = ask(client, text(QUESTION), stream=stream, **options)
        return events(response.text)[-1] if stream else response.json()

    with served(engines, ServerLimits(answer_tokens=3)) as (client, _):
        assert answer(max_tokens=2)["note"] == "cut at 2 tokens; set max_completion_tokens"
        assert answer(max_tokens=2)["confidence"] > 0  # the client set the length
        assert answer(max_tokens=3)["confidence"] > 0
        for options in ({}, {"max_tokens": 9}):
            assert answer(**options)["note"] == "cut at 3 tokens, the server's maximum"
            assert answer(**options)["confidence"] == 0
        first = ask(client, text(QUESTION), max_tokens=1).json()["choices"][0]["message"]["content"]
        assert "note" not in answer(stop=[first[:1]])


@pytest.mark.parametrize("stream", [False, True])
def test_an_unlikely_answer_has_a_warning(client: httpx.Client, monkeypatch: Any, engines: Any, stream: bool) -> None:
    def note_of() -> dict[str, Any]:
        answer = ask(client, text(QUESTION), max_tokens=4, stream=stream)
        return events(answer.text)[-1] if stream else answer.json()

    assert 0 <= note_of()["confidence"] <= 1
    assert "warning" not in note_of()  # no calibration
    monkeypatch.setattr(engines["pictures"], "calibrated", True)
    monkeypatch.setattr("mmdec.serving.server.LIKELY_WRONG", 1.1)
    assert "likely wrong" in note_of()["warning"]


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"messages":', b"[" * 100_000])
def test_malformed_json_is_refused(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_streamed_deltas_are_never_retracted() -> None:
    deltas = TextDeltas(("STOP", "\n\n"))
    grown = [deltas.next_delta(text) for text in (" He", " Hello ", " Hello S", " Hello STO", " Hello STX ")]
    assert grown == ["He", "llo", "", "", " STX"]
    assert deltas.next_delta(" Hello STX y\n") == " y"
    assert deltas.next_delta(" Hello STX y\n\nmore") == ""
    assert deltas.end(deltas.until_stop("Hello STX y\n\nmore")) == ""
