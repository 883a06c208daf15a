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
from urllib.parse import unquote, unquote_to_bytes

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

import mmdec
from mmdec.serving.dialogue import Dialogue
from mmdec.serving.engines import AnswerEngine
from mmdec.serving.queue import Job
from mmdec.serving.server import ApiError, EventStream, Server, api_note, confidence_warning, server_of
from mmdec.tasks.confidence import CUT_CONFIDENCE

router = APIRouter(prefix="/v1/chat")
MAX_PICTURES = 16
# a data: URL up to its data: the media type, its parameters, and whether the data are in base64
DATA = re.compile(r"\s*data:image/[\w.+-]+((?:;[^;,]*)*?)(;\s*base64\s*)?,", re.ASCII | re.IGNORECASE)
BLANK = re.compile(r"\s+", re.ASCII)
# Fields that would change the answer, and that nothing here can do: name -> (values that ask for nothing, what is
# lacking). Null asks for nothing either.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": (({},), "no model here answers in speech"),
    "frequency_penalty": ((0,), "tokens are not penalised"),
    "function_call": (("none", "auto"), "no model here calls functions"),
    "functions": (([],), "no model here calls functions"),
    "logit_bias": (({},), "tokens are not favoured"),
    "logprobs": ((False,), "log-probabilities are not returned"),
    "modalities": (([], ["text"]), "answers are text"),
    "moderation": (({},), "nothing is moderated"),
    "n": ((1,), "a request has one answer"),
    "presence_penalty": ((0,), "tokens are not penalised"),
    "reasoning_effort": (("none",), "no model here reasons before it answers"),
    "response_format": (({}, {"type": "text"}), "answers are plain text"),
    "tool_choice": (("none", "auto"), "no model here calls tools"),
    "tools": (([],), "no model here calls tools"),
    "top_logprobs": ((0,), "log-probabilities are not returned"),
    "verbosity": (("medium",), "the length of an answer is the model's choice"),
    "web_search_options": (({},), "the server searches nothing"),
}


class Address(BaseModel):
    """The address of a picture: a data: URL, which contains the picture itself.

    Other URLs are rejected, because the server downloads nothing.
    """

    url: str
    detail: str | None = None


class MessagePart(BaseModel):
    """One part of a message's content: a text, an assistant's refusal, which is a text too, or a picture."""

    type: Literal["text", "refusal", "image_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: Address | None = None


class Message(BaseModel):
    """One message of a dialogue: the role of its writer, and its content."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[MessagePart] | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None
    function_call: None = None
    audio: None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """The body of a request.

    Null is the same as a field that is left out. Other fields than these are refused, because they might change the
    answer.
    """

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    model: str | None = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # fields that do not change the answer: about accounts, storage, caches and speed
    metadata: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, body: Any) -> Any:
        """Drop fields that ask for nothing.

        Raises:
            ApiError: For a field that asks for something that is not supported.
        """
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        for name, (neutral, lack) in UNSUPPORTED.items():
            value = given.pop(name, neutral[0])
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
                raise ApiError(400, f"`{name}` must be left out: {lack}.", code="unsupported_parameter", param=name)
        return given


@router.post("/completions", response_model=None)
async def completions(request: Request, body: ChatRequest) -> Response:
    """Generate the next message of a dialogue."""
    server = server_of(request)
    engine = server.engine(body.model or None, AnswerEngine)
    name = next(name for name, model in server.models.items() if model is engine)
    messages, pictures = _read(body.messages)
    dialogue = await server.read(partial(Dialogue.of, engine.vlm, messages, pictures))
    stops = tuple(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or ()))
    limit = server.limits.tokens
    wanted = body.max_completion_tokens or body.max_tokens
    if body.top_p == 0:  # the most likely token alone
        sampled = False
    elif body.temperature is not None:
        sampled = body.temperature > 0
    else:  # no temperature given: the settings of the model decide whether to sample
        sampled = True if body.top_p is not None and body.top_p < 1 else None
    job = engine.job(
        dialogue,
        max_new_tokens=min(wanted or limit, limit),
        do_sample=sampled,
        temperature=body.temperature or None,
        top_p=None if sampled is False else body.top_p,
        seed=None if sampled is False or body.seed is None else body.seed % 2**63,
        stop_strings=stops or None,
    )
    answer = _Answer(name, stops, engine, dialogue.tokens, limit, wanted)
    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await EventStream.of(answer.chunks(server, request, job, usage))
    return JSONResponse(answer.whole(await server.result(request, job)))


def _read(messages: list[Message]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Convert the messages to the format of chat templates.

    Returns:
        The messages, and the bytes of their pictures in order.

    Raises:
        ApiError: If a message or part lacks its content, or there are too many pictures.
    """
    pictures, turns = list[bytes](), list[dict[str, Any]]()
    for message in messages:
        content = message.content
        if content is None:
            if message.role != "assistant":
                raise ApiError(400, f"`messages` must hold the content of each {message.role}.", param="messages")
            content = message.refusal or ""
        parts: list[dict[str, str]] = []
        for part in [MessagePart(type="text", text=content)] if isinstance(content, str) else content:
            text = part.refusal if part.type == "refusal" else part.text
            if part.type != "image_url" and text is not None:
                parts.append({"type": "text", "text": text})
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
    """Return the bytes in a data: URL.

    As browsers do, it takes any letter case, parameters such as a charset, line breaks, percent-encoding and base64
    without padding.

    Raises:
        ApiError: If it is no data: URL, or not base64.
    """
    head = DATA.match(url)
    if head is None:
        raise ApiError(
            400,
            "`image_url` must be data:image/...;base64,... Other addresses are not fetched: send the picture itself.",
            param="messages",
        )
    data = url[head.end() :]
    if head[2] is None:
        return unquote_to_bytes(data)
    try:
        content = BLANK.sub("", unquote(data)).rstrip("=")
        return base64.b64decode(content + "=" * (-len(content) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"`image_url` must be valid base64, but is not: {error}.", param="messages") from None


class _Answer:
    """Converts one request's results to responses in OpenAI's format. Holds what all responses of the request share.

    Args:
        model: The model's name.
        stops: Strings at which the text ends.
        engine: Of the model.
        prompt: Number of prompt tokens.
        limit: The server's maximum of new tokens.
        wanted: The client's; None: it set none.
    """

    def __init__(
        self, model: str, stops: tuple[str, ...], engine: AnswerEngine, prompt: int, limit: int, wanted: int | None
    ) -> None:
        self._by_client = wanted is not None and wanted <= limit
        self._remedy = "; set max_completion_tokens" if (wanted or limit) < limit else ", the server's maximum"
        self._stops, self._engine, self._prompt = stops, engine, prompt
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, result: mmdec.Description) -> dict[str, Any]:
        """Make the complete response to a request that does not ask for a stream."""
        message = {"role": "assistant", "content": result.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(result)}
        content = {**self._head, "object": "chat.completion", "choices": [choice], "usage": self._usage(result)}
        return content | self._confidence_fields(result)

    async def chunks(self, server: Server, request: Request, job: Job, usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a streamed response, each as a dict.

        Args:
            usage: Whether a last chunk with the token counts follows.
        """
        job.streams, begun = True, False
        async for kind, value in server.events(request, job):
            if not begun:
                yield self._chunk({"role": "assistant", "content": ""})
                begun = True
            if kind == "text":
                yield self._chunk({"content": value})
            else:
                yield self._chunk({}, self._reason(value)) | self._confidence_fields(value)
                if usage:
                    chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
                    yield chunk | {"usage": self._usage(value)}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _reason(self, result: mmdec.Description) -> str:
        """Return the result's finish reason, but "stop" for a text whose last token completes a stop string."""
        # the text of the result was cut before the stop string
        decode = self._engine.vlm.tokenizer.decode
        written = [decode(result.tokens, skip_special_tokens=skips) for skips in (True, False)]
        return "stop" if any(stop in text for stop in self._stops for text in written) else result.finish_reason

    def _confidence_fields(self, result: mmdec.Description) -> dict[str, Any]:
        """Return the fields about an answer's confidence, and its note."""
        sure, note = result.confidence, {}
        if self._reason(result) == "length":
            note = {"note": api_note(result.note, self._remedy)}
            sure = sure if self._by_client else min(sure, CUT_CONFIDENCE)
        return {"confidence": sure} | note | confidence_warning(sure, self._engine.calibrated)

    def _usage(self, result: mmdec.Description) -> dict[str, int]:
        written = len(result.tokens)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": written,
            "total_tokens": self._prompt + written,
        }
