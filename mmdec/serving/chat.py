"""`/v1/chat/completions`: answers dialogues with pictures, in one response or as a stream while tokens are accepted."""

from __future__ import annotations

import base64
import binascii
import re
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

import mmdec
from mmdec.pipelines.description.chat import Dialogue
from mmdec.serving.engines import Answering
from mmdec.serving.server import ApiError, EventStream, Server, server_of
from mmdec.serving.waiting import Job

router = APIRouter(prefix="/v1/chat")
MAX_PICTURES = 16
DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)


class Address(BaseModel):
    """The address of a picture: a data: URL, which contains the picture itself. Other URLs are rejected, because the
    server downloads nothing."""

    url: str
    detail: str | None = None


class Part(BaseModel):
    """One part of a message's content: a text or a picture."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Address | None = None


class Message(BaseModel):
    """One message of a dialogue: the role of its writer, and its content."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of a request. Fields that are not listed here are refused, because they might change the answer."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    model: str | None = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logprobs: Literal[False] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None


@router.post("/completions", response_model=None)
async def completions(request: Request, body: ChatRequest) -> Response:
    """Generate the next message of a dialogue."""
    server = server_of(request)
    engine = server.engine(body.model, Answering)
    name = next(name for name, model in server.models.items() if model is engine)
    messages, pictures = _read(body.messages)
    dialogue = await server.read(partial(Dialogue.of, engine.vlm, messages, pictures))
    stops = tuple(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or ()))
    most = min(body.max_completion_tokens or body.max_tokens or server.limits.tokens, server.limits.tokens)
    if body.temperature is not None:
        sampled = body.temperature > 0
    else:  # no temperature given: the settings of the model decide whether to sample
        sampled = True if body.top_p is not None and body.top_p < 1 else None
    job = engine.job(
        dialogue,
        max_new_tokens=most,
        do_sample=sampled,
        temperature=body.temperature or None,
        top_p=None if sampled is False else body.top_p,
        seed=None if sampled is False else body.seed,
        stop_strings=stops or None,
    )
    answer = _Answer(name, stops, engine.vlm, dialogue.tokens, most)
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        return await EventStream.of(answer.chunks(server, request, job, usage))
    return JSONResponse(answer.whole(await server.result(request, job)))


def _read(messages: list[Message]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Convert the messages to the format of chat templates. Returns: the messages, and the bytes of their pictures in
    order. Raises ApiError."""
    pictures, turns = list[bytes](), list[dict[str, Any]]()
    for message in messages:
        content = [Part(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        parts: list[dict[str, str]] = []
        for part in content:
            if part.type == "text" and part.text is not None:
                parts.append({"type": "text", "text": part.text})
            elif part.type == "image_url" and part.image_url is not None:
                pictures.append(_picture(part.image_url.url))
                parts.append({"type": "image"})
            else:
                raise ApiError(400, f"`messages` must hold the {part.type} of each part.", param="messages")
        turns.append({"role": "system" if message.role == "developer" else message.role, "content": parts})
    if len(pictures) > MAX_PICTURES:
        raise ApiError(400, f"`messages` must hold at most {MAX_PICTURES} pictures.", param="messages")
    return turns, pictures


def _picture(url: str) -> bytes:
    head = DATA.match(url)
    if head is None:
        raise ApiError(
            400,
            "`image_url` must be data:image/...;base64,... Other addresses are not fetched: send the picture itself.",
            param="messages",
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"`image_url` must be valid base64, but is not: {error}.", param="messages") from None


class _Answer:
    """Converts one request's results to responses in OpenAI's format. Holds what all responses of the request share."""

    def __init__(self, model: str, stops: tuple[str, ...], vlm: Any, prompt: int, most: int) -> None:
        """model: the model's name. stops: strings at which the text ends. vlm: the loaded model. prompt: number of
        prompt tokens. most: maximum number of new tokens."""
        self._stops, self._vlm, self._prompt, self._most = stops, vlm, prompt, most
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, result: mmdec.Description) -> dict[str, Any]:
        """Make the complete response to a request that does not ask for a stream."""
        text = result.text[: min((result.text.find(s) for s in self._stops if s in result.text), default=None)]
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(result)}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": self._usage(result)}

    async def chunks(self, server: Server, request: Request, job: Job, usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a streamed response, each as a dict. usage: whether a last chunk with the token counts
        follows."""
        job.streams, begun = True, False
        async for kind, value in server.events(request, job):
            if not begun:
                yield self._chunk({"role": "assistant", "content": ""})
                begun = True
            if kind == "text":
                yield self._chunk({"content": value})
            else:
                yield self._chunk({}, self._reason(value))
                if usage:
                    chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
                    yield chunk | {"usage": self._usage(value)}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _reason(self, result: mmdec.Description) -> str:
        ends = self._vlm.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        whole = result.tokens[-1:] and result.tokens[-1] in ends
        stopped = any(stop in result.text for stop in self._stops)
        return "stop" if whole or stopped else "length"

    def _usage(self, result: mmdec.Description) -> dict[str, int]:
        written = len(result.tokens)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": written,
            "total_tokens": self._prompt + written,
        }
