"""Tests a server of a language model: chats and completions, whole and streamed, equal those of the public call."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

import mmdec
from mmdec.serving.engines import EngineOptions, load_engine
from mmdec.serving.server import ServerLimits
from tests.support import tiny_text_folder
from tests.support.pictures import pixels
from tests.support.running_servers import events, picture, served, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = "Once upon a time there was a dog."


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two language models: one with a chat template, one without."""
    home, texts = tmp_path_factory.mktemp("texts"), tiny_text_folder.OTHER
    folders = [
        tiny_text_folder.write(home / "talks", texts, 3, chat=True),
        tiny_text_folder.write(home / "writes", texts, 4),
    ]
    return dict(load_engine(str(folder), EngineOptions(threads=1), "cpu", None) for folder in folders)


@pytest.fixture(scope="module")
def web(texts: dict[str, Any]) -> Iterator[httpx.Client]:
    with served(texts) as (client, _):
        yield client


def tokens_alone(texts: dict[str, Any], name: str, text: str, **options: Any) -> list[int]:
    """The new tokens of the public call, without drafts."""
    loaded = texts[name].loaded
    special = {} if name == "writes" else {"add_special_tokens": False}
    inputs = loaded.tokenizer(text, return_tensors="pt", **special)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    out = mmdec.generate(loaded.model, inputs, drafter=None, **options).sequences[0]
    return out[inputs["input_ids"].shape[1] :].tolist()


def decoded(texts: dict[str, Any], name: str, tokens: list[int]) -> str:
    return texts[name].tokenizer.decode(tokens, skip_special_tokens=True)


def ask(client: httpx.Client, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": QUESTION}]
    return client.post(CHAT, json={"model": "talks", "messages": messages, "temperature": 0} | body)


def complete(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post(TEXT, json={"model": "writes", "prompt": QUESTION, "temperature": 0} | body)


def test_a_chat_is_the_call_on_what_the_template_writes(web: httpx.Client, texts: dict[str, Any]) -> None:
    tokens = tokens_alone(texts, "talks", f"{QUESTION} ", max_new_tokens=24, do_sample=False)
    answer = ask(web, max_tokens=24).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": decoded(texts, "talks", tokens).strip(),
        "refusal": None,
    }
    assert choice["finish_reason"] == ("length" if len(tokens) == 24 else "stop")
    assert answer["usage"]["completion_tokens"] == len(tokens)
    assert "confidence" not in answer
    chunks = events(ask(web, max_tokens=24, stream=True, stream_options={"include_usage": True}).text)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
    assert "".join(deltas) == choice["message"]["content"]
    assert chunks[-1]["usage"] == answer["usage"]


def test_a_completion_is_the_call_on_the_text(web: httpx.Client, texts: dict[str, Any]) -> None:
    tokens = tokens_alone(texts, "writes", QUESTION, max_new_tokens=24, do_sample=False)
    wanted = decoded(texts, "writes", tokens)
    answer = complete(web, max_tokens=24).json()
    assert (answer["object"], answer["model"]) == ("text_completion", "writes")
    assert answer["choices"][0]["text"] == wanted
    assert complete(web, max_tokens=24, prompt=[QUESTION]).json()["choices"] == answer["choices"]
    chunks = events(complete(web, max_tokens=24, stream=True).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted
    assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_requests_that_share_passes_get_their_own_texts(texts: dict[str, Any]) -> None:
    prompts = [f"{QUESTION} {'Nobody knows why. ' * count}" for count in range(6)]
    wanted = [
        decoded(texts, "writes", tokens_alone(texts, "writes", prompt, max_new_tokens=40, do_sample=False))
        for prompt in prompts
    ]
    with served(texts) as (client, server), ThreadPoolExecutor(6) as pool:
        lock = mmdec.model_lock(texts["writes"].loaded.model)
        with lock.write():  # none begins before all have come
            answers = [pool.submit(complete, client, prompt=prompt, max_tokens=40) for prompt in prompts]
            until(lambda: server.load()["writes"].waiting == 6)
        assert [answer.result().json()["choices"][0]["text"] for answer in answers] == wanted
        assert 'mmdec_batch_rows_bucket{model="writes",le="4"} ' in client.get("/metrics").text
        rows = client.get("/metrics").text.partition('mmdec_batch_rows_sum{model="writes"} ')[2].split()[0]
        steps = client.get("/metrics").text.partition('mmdec_batch_rows_count{model="writes"} ')[2].split()[0]
        assert float(rows) > 2 * float(steps)


def test_a_seed_gives_the_call_s_sample(web: httpx.Client, texts: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.5, "top_p": 0.9}
    answers = {}
    for seed in (1, 2, 3):
        wanted = decoded(texts, "writes", tokens_alone(texts, "writes", QUESTION, seed=seed, **options))
        answers[seed] = complete(web, max_tokens=20, temperature=1.5, top_p=0.9, seed=seed).json()["choices"][0]["text"]
        assert answers[seed] == wanted
    assert len(set(answers.values())) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(web: httpx.Client, stream: bool) -> None:
    whole = complete(web, max_tokens=30).json()["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    answer = complete(web, max_tokens=30, stop=[stop], stream=stream)
    parts = events(answer.text) if stream else [answer.json()]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole[: whole.index(stop)]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_model(web: httpx.Client, texts: dict[str, Any], stream: bool) -> None:
    loaded = texts["writes"].loaded
    tokens = tokens_alone(texts, "writes", QUESTION, max_new_tokens=16, do_sample=False)
    ids = torch.tensor([loaded.tokenizer(QUESTION)["input_ids"] + tokens])
    with torch.inference_mode():
        scores = loaded.model(ids).logits[0].log_softmax(-1)
    first = ids.shape[1] - len(tokens)
    wanted = [float(scores[first + n - 1, token]) for n, token in enumerate(tokens)]
    special = loaded.tokenizer.all_special_ids
    wanted = [value for value, token in zip(wanted, tokens, strict=True) if token not in special]
    answer = complete(web, max_tokens=16, logprobs=0, stream=stream)
    parts = events(answer.text) if stream else [answer.json()]
    given = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    assert [value for each in given for value in each["token_logprobs"]] == pytest.approx(wanted, abs=1e-4)
    offsets = [offset for each in given for offset in each["text_offset"]]
    assert offsets == sorted(offsets)
    answer = ask(web, max_tokens=16, logprobs=True, stream=stream)
    parts = events(answer.text) if stream else [answer.json()]
    told = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    chosen = [each for part in told for each in part["content"]]
    assert all(each["logprob"] <= 0 for each in chosen)
    assert len(chosen) > 0


def test_special_tokens_in_messages_are_text(web: httpx.Client, texts: dict[str, Any]) -> None:
    tokenizer = texts["talks"].tokenizer
    end = tokenizer.eos_token
    counts = [
        ask(web, messages=[{"role": "user", "content": text}], max_tokens=1).json()["usage"]["prompt_tokens"]
        for text in ("a dog", f"a{end} dog")
    ]
    plain = tokenizer(f"a{end} dog ", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert counts[1] == len(plain) > counts[0]


def test_what_a_model_of_text_cannot_do_is_refused(web: httpx.Client) -> None:
    shown = [{"role": "user", "content": [picture(pixels(1)), {"type": "text", "text": "What is this?"}]}]
    refused = [
        (ask(web, messages=shown), "pictures"),
        (ask(web, model="writes"), "chat template"),
        (complete(web, prompt=["a", "b"]), "prompt"),
        (complete(web, prompt=[1, 2]), "prompt"),
        (complete(web, prompt=""), "`prompt` must have at least one token"),
        (complete(web, prompt="a dog " * 400), "positions"),
        (complete(web, echo=True), "`echo`"),
        (complete(web, n=2), "`n`"),
        (complete(web, logprobs=2), "logprobs"),
        (complete(web, nothing=1), "nothing"),
    ]
    for answer, named in refused:
        assert answer.status_code == 400, answer.text
        assert named in answer.json()["error"]["message"]
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert complete(web, model="nobody").status_code == 404


def test_a_request_beyond_the_cache_is_refused_with_both_numbers(texts: dict[str, Any]) -> None:
    with served(texts, ServerLimits(cache_tokens=50)) as (client, _):
        answer = complete(client, max_tokens=200)
        assert answer.status_code == 400
        assert "must take up at most 50 tokens" in answer.json()["error"]["message"]
        assert complete(client, max_tokens=20, stream=True).status_code == 200
        refused = complete(client, max_tokens=200, stream=True)
        assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")


def test_a_closed_stream_frees_its_row(texts: dict[str, Any]) -> None:
    with served(texts, ServerLimits(rows=1)) as (client, server):
        body = {"model": "writes", "prompt": QUESTION, "max_tokens": 200, "temperature": 0, "stream": True}
        with client.stream("POST", TEXT, json=body) as answer:
            next(answer.iter_bytes())
        until(lambda: not server.scheduler.load())
        assert complete(client, max_tokens=4).status_code == 200


def test_running_requests_get_an_error_when_the_server_ends_at_once(texts: dict[str, Any]) -> None:
    with served(texts) as (client, server), ThreadPoolExecutor(1) as pool:
        with mmdec.model_lock(texts["writes"].loaded.model).write():
            waits = pool.submit(complete, client, max_tokens=4)
            until(lambda: server.load()["writes"].waiting == 1)
            server.scheduler.close()
        answer = waits.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopped")


def test_openais_client_chats_and_completes(texts: dict[str, Any]) -> None:
    openai = pytest.importorskip("openai", reason="needs `pip install openai`")
    with served(texts) as (server, _):
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
        assert {model.id for model in client.models.list()} == {"talks", "writes"}
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
        chat: dict[str, Any] = {"model": "talks", "messages": messages, "max_completion_tokens": 12, "temperature": 0}
        tokens = tokens_alone(texts, "talks", f"Be short. {QUESTION} ", max_new_tokens=12, do_sample=False)
        wanted = decoded(texts, "talks", tokens).strip()
        answer = client.chat.completions.create(**chat, logprobs=True).choices[0]
        assert answer.message.content == wanted
        assert answer.logprobs.content[0].logprob <= 0
        chunks = [*client.chat.completions.create(**chat, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
        text: dict[str, Any] = {"model": "writes", "prompt": QUESTION, "max_tokens": 12, "temperature": 0}
        wanted = decoded(texts, "writes", tokens_alone(texts, "writes", QUESTION, max_new_tokens=12, do_sample=False))
        whole = client.completions.create(**text, logprobs=0)
        assert whole.choices[0].text == wanted
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        parts = [*client.completions.create(**text, stream=True)]
        assert "".join(part.choices[0].text for part in parts) == wanted
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**text, n=2)


def test_fields_of_a_completion_may_be_null(web: httpx.Client) -> None:
    pytest.importorskip("openai", reason="needs `pip install openai`")
    from typing import get_type_hints

    from openai.types.completion_create_params import CompletionCreateParamsStreaming as Params

    names = {*get_type_hints(Params)} - {"model", "prompt"}
    assert len(names) > 12
    answer = complete(web, **{**dict.fromkeys(names), "max_tokens": 2})
    assert answer.status_code == 200, answer.text
