"""Tests the server: access tokens, limits of size, time and number; clients that disconnect; shutdown; counters."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.serving.app import listening_sockets, make_server
from mmdec.serving.engines import EngineOptions, load_engine
from mmdec.serving.server import Server, ServerLimits, unknown_model
from tests.support.measurements import measurements
from tests.support.pictures import QUESTION, pixels
from tests.support.running_servers import picture, served, until, wav

TRANSCRIBE, CHAT = "/v1/audio/transcriptions", "/v1/chat/completions"


def post(client: httpx.Client, sound: bytes, **form: Any) -> httpx.Response:
    return client.post(TRANSCRIBE, files={"file": ("a.wav", sound)}, data=form)


def counted(client: httpx.Client, name: str) -> float:
    """A counter, over all labels."""
    rows = re.findall(rf"^mmdec_{name}(?:{{.*}})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return sum(map(float, rows))


def busy(server: Server) -> int:
    """The number of requests that wait or are decoded."""
    return sum(load.waiting + load.rows for load in server.load().values())


def test_the_api_key_is_required(engines: dict[str, Any]) -> None:
    with served(engines, token="sesame") as (client, _):
        assert post(client, wav(0.5)).status_code == 200
        client.headers["Authorization"] = "Bearer Sesame"
        for answer in (post(client, wav(0.5)), client.get("/v1/models")):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "token"
        assert client.get("/health").json()["status"] == "ok"


def test_an_unknown_model_is_named_beside_those_that_can_answer() -> None:
    error = unknown_model("gone", ["whisper", "pictures"]).content["error"]
    assert error["message"] == "`model` must be one of whisper, pictures, but is 'gone'."
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "This server has no model for such requests" in str(unknown_model(None, ()))


def test_models_are_listed(engines: dict[str, Any]) -> None:
    with served(engines) as (client, _):
        listed = client.get("/v1/models").json()["data"]
        assert {each["id"]: each["task"] for each in listed} == {
            "whisper": "transcription",
            "translator": "translation",
            "pictures": "answer",
        }
        for answer, status in ((client.get("/nothing"), 404), (client.get(TRANSCRIBE), 405)):
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


def test_too_large_requests_are_refused(engines: dict[str, Any]) -> None:
    with served(engines, ServerLimits(megabytes=0.05, audio_seconds=1.0)) as (client, _):
        assert post(client, wav(1.2)).status_code == 400  # too long
        assert post(client, wav(2.0)).status_code == 413

        def lies() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            yield from [bytes(10_000)] * 50

        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = client.post(TRANSCRIBE, content=lies(), headers=headers)  # of no declared length
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert post(client, wav(0.5)).status_code == 200


def test_too_slow_uploads_are_refused(engines: dict[str, Any]) -> None:
    head = f"POST {TRANSCRIBE} HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n"
    with (
        served(engines, ServerLimits(upload_seconds=0.2)) as (client, _),
        socket.create_connection((client.base_url.host, client.base_url.port or 0)) as slow,
    ):
        slow.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x".encode())
        assert slow.recv(99).startswith(b"HTTP/1.1 408")


def test_a_full_server_answers_retry_later(engines: dict[str, Any]) -> None:
    lock = mmdec.model_lock(engines["whisper"].loaded.model)
    with served(engines, ServerLimits(requests=2)) as (client, server), ThreadPoolExecutor(2) as pool:
        with lock.write():
            accepted = [pool.submit(post, client, wav(0.5, seed)) for seed in range(2)]
            until(lambda: server.open == 2)
            answer = post(client, wav(0.5))
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
        assert [each.result().status_code for each in accepted] == [200, 200]
        assert post(client, wav(0.5)).status_code == 200


def test_a_too_slow_answer_times_out(engines: dict[str, Any]) -> None:
    with (
        served(engines, ServerLimits(answer_seconds=0.3)) as (client, _),
        mmdec.model_lock(engines["whisper"].loaded.model).write(),
    ):
        answer = post(client, wav(0.5))
        assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")


def test_a_request_whose_client_left_is_not_decoded(engines: dict[str, Any], folder: Path) -> None:
    """One while it waits, one in the batch that has begun; their neighbour gets its own text."""
    lock = mmdec.model_lock(engines["whisper"].loaded.model)
    with served(engines) as (client, server), ThreadPoolExecutor(1) as pool:
        with lock.write():
            left = [hanging(client, wav(0.6, seed)) for seed in range(2)]
            until(lambda: busy(server) == 2)
            stays = pool.submit(post, client, wav(0.7, 7))
            until(lambda: busy(server) == 3)
            for connection in left:
                connection.close()
            until(lambda: server.open == 1)
        assert stays.result().json()["text"] == mmdec.transcribe(wav(0.7, 7), model=folder / "whisper").text
        until(lambda: counted(client, "stopped_total") == 2)


def test_a_waiting_request_whose_client_left_is_dropped(engines: dict[str, Any]) -> None:
    """While the model is being changed: the place is free at once, and the other request goes on waiting."""
    lock = mmdec.model_lock(engines["whisper"].loaded.model)
    with served(engines) as (client, server), ThreadPoolExecutor(1) as pool:
        with lock.write():
            stays = pool.submit(post, client, wav(0.7, 7))
            until(lambda: busy(server) == 1)
            left = hanging(client, wav(0.6))
            until(lambda: busy(server) == 2)
            left.close()
            until(lambda: server.open == 1)
            assert client.get("/health").json() == {"status": "ok", "waiting": 1, "decoding": 0}
        assert stays.result().status_code == 200
        assert counted(client, "stopped_total") == 1


def hanging(client: httpx.Client, sound: bytes) -> socket.socket:
    """A connection on which a request was sent whole."""
    request = client.build_request("POST", TRANSCRIBE, files={"file": ("a.wav", sound)})
    connection = socket.create_connection((client.base_url.host, client.base_url.port or 0))
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection.sendall(f"POST {TRANSCRIBE} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
    return connection


def test_a_row_ends_within_a_round_when_its_client_leaves(engines: dict[str, Any], folder: Path) -> None:
    """The other row of its batch is decoded as if alone."""
    bodies = [
        {"messages": [{"role": "user", "content": [picture(pixels(seed)), {"type": "text", "text": QUESTION}]}]}
        for seed in (6, 7)
    ]
    bodies = [{**body, "max_tokens": 48, "temperature": 0} for body in bodies]
    with served(engines) as (client, server), ThreadPoolExecutor(1) as pool:
        with client.stream("POST", CHAT, json={**bodies[0], "stream": True}) as answer:
            next(answer.iter_bytes())
            stays = pool.submit(client.post, CHAT, json=bodies[1])
            until(lambda: server.load()["pictures"].rows == 2 or stays.done() or server.open == 1)
        wanted = mmdec.describe(pixels(7), QUESTION, model=folder / "pictures", max_new_tokens=48).text
        assert stays.result().json()["choices"][0]["message"]["content"] == wanted
        until(lambda: server.load()["pictures"].rows == 0)


def test_shutdown_finishes_running_and_waiting_requests(engines: dict[str, Any], folder: Path) -> None:
    """The shutdown begins while the model is still busy."""
    sounds = [wav(0.6, seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool, ExitStack() as held:
        with served(engines) as (client, server):
            held.enter_context(mmdec.model_lock(engines["whisper"].loaded.model).write())
            answers = [pool.submit(post, client, sound) for sound in sounds]
            until(lambda: busy(server) == 3)
            threading.Timer(1.0, held.close).start()
        assert all(answer.result().status_code == 200 for answer in answers)
    wanted = [mmdec.transcribe(sound, model=folder / "whisper").text for sound in sounds]
    assert [answer.result().json()["text"] for answer in answers] == wanted


def test_counters_are_exported(engines: dict[str, Any]) -> None:
    with served(engines) as (client, _):
        post(client, wav(0.5))
        post(client, b"no sound")
        text = client.get("/metrics").text
        assert f'mmdec_requests_total{{endpoint="{TRANSCRIBE}",status="200"}} 1' in text
        assert f'mmdec_requests_total{{endpoint="{TRANSCRIBE}",status="400"}} 1' in text
        assert counted(client, "sound_seconds_total") == pytest.approx(0.5)
        assert counted(client, "tokens_total") >= counted(client, "rounds_total") - 1 > 0
        assert f'mmdec_request_seconds_count{{endpoint="{TRANSCRIBE}"}} 2' in text
        assert 'mmdec_batch_rows_bucket{model="whisper",le="1"} ' in text
        for name in ("requests_waiting", "rows_running", "cache_tokens"):
            assert f'mmdec_{name}{{model="whisper"}} 0' in text
        assert "mmdec_cache_tokens_limit 32768" in text


def test_two_models_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder / "whisper", tmp_path / "whisper")
    with pytest.raises(mmdec.InputError, match="'whisper'"):
        make_server([str(folder / "whisper"), str(other)], device="cpu")


def test_a_taken_port_is_refused_before_models_are_loaded(folder: Path, tmp_path: Path) -> None:
    with listening_sockets("127.0.0.1", 0) as (taken,):
        port = str(taken.getsockname()[1])
        words = ["serve", str(tmp_path / "nothing"), "--port", port]
        result = CliRunner().invoke(cli.app, words)
        assert isinstance(result.exception, mmdec.MmdecError)
        assert port in str(result.exception)
        assert "mmdec serves" not in result.output
    with listening_sockets("127.0.0.1", int(port)) as sockets:  # free again, and served
        running, _ = make_server([str(folder / "whisper")], threads=1, device="cpu")
        thread = threading.Thread(target=running.run, args=(sockets,))
        thread.start()
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60, trust_env=False).status_code == 200
        running.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def test_runs_learn_in_the_servers_statistics(folder: Path) -> None:
    statistics, before = mmdec.DecodingStatistics(), measurements(mmdec.default_statistics())
    name, engine = load_engine(str(folder / "whisper"), EngineOptions(threads=1, statistics=statistics), "cpu", None)
    with served({name: engine}) as (client, _):
        post(client, wav(0.9))
    assert statistics._targets
    assert measurements(mmdec.default_statistics()) == before


def test_a_browser_may_call_from_a_page_that_is_named(engines: dict[str, Any]) -> None:
    page, asks = "https://example.org", {"Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization,content-type"}
    allowed = "access-control-allow-origin"
    with served(engines, token="sesame", origins=[page]) as (client, _):
        del client.headers["Authorization"]
        answer = client.options(TRANSCRIBE, headers={"Origin": page, **asks})
        assert (answer.status_code, answer.headers[allowed]) == (200, page)
        assert client.options(TRANSCRIBE, headers={"Origin": "https://else.org", **asks}).status_code == 400
        refused = client.get("/v1/models", headers={"Origin": page})  # without a token: the page may read why
        assert (refused.status_code, refused.headers[allowed]) == (401, page)
    with served(engines) as (client, _):
        assert client.options(TRANSCRIBE, headers={"Origin": page, **asks}).status_code == 405


def test_a_page_may_read_every_header_that_the_server_adds(engines: dict[str, Any]) -> None:
    headers, cut = {"Origin": "https://example.org"}, {"file": ("talk.wav", wav(0.8)[:-6400])}
    usual = {"content-length", "content-type", "date", "server", "vary"}
    with served(engines, origins=["*"]) as (client, _):
        for path in (TRANSCRIBE, "/v1/audio/translations/speech"):
            answer = client.post(
                path, files=cut, data={"response_format": "text"} if path == TRANSCRIBE else {}, headers=headers
            )
            exposed = {each.strip().lower() for each in answer.headers["access-control-expose-headers"].split(",")}
            added = {name for name in answer.headers if name not in usual and not name.startswith("access-control-")}
            assert "x-note" in added <= exposed
            assert "retry-after" in exposed


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/page", ""])
def test_an_origin_is_what_browsers_send(origin: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--allow-origin", origin])
    assert result.exit_code != 0
    assert "`--allow-origin` must be" in f"{result.output}{result.exception}"
