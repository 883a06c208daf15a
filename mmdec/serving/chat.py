"""`/v1/chat/completions`: continues dialogues, with pictures if the model reads them, whole or as a stream."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, final
from urllib.parse import unquote, unquote_to_bytes

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from mmdec.core.growing_text import REPLACEMENT_CHARACTER
from mmdec.serving.answers import Answer, AnswerPiece
from mmdec.serving.completions import AnswerWriter, CompletionRequest
from mmdec.serving.engines import DialogueEngine, TextEngine, VisionEngine
from mmdec.serving.server import ApiError, server_of

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
    "modalities": (([], ["text"]), "answers are text"),
    "moderation": (({},), "nothing is moderated"),
    "n": ((1,), "a request has one answer"),
    "presence_penalty": ((0,), "tokens are not penalised"),
    "reasoning_effort": (("none",), "no model here reasons before it answers"),
    "response_format": (({}, {"type": "text"}), "answers are plain text"),
    "tool_choice": (("none", "auto"), "no model here calls tools"),
    "tools": (([],), "no model here calls tools"),
    "top_logprobs": ((0,), "only the log-probabilities of the answer's own tokens are returned"),
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


class ChatRequest(CompletionRequest):
    """The body of a request."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    # fields that do not change the answer
    parallel_tool_calls: Any = None

    unsupported = UNSUPPORTED


@router.post("/completions", response_model=None)
async def completions(request: Request, body: ChatRequest) -> Response:
    """Generate the next message of a dialogue."""
    server = server_of(request)
    engine: DialogueEngine[Any] = server.engine(body.model or None, VisionEngine, TextEngine)
    messages, pictures = _read(body.messages)
    dialogue: Any = await server.read(partial(engine.read_dialogue, messages, pictures))
    wanted = body.max_completion_tokens or body.max_tokens
    job = engine.job(dialogue, **body.options(server, wanted))
    answer = ChatAnswer(server, engine, dialogue.tokens, wanted, "max_completion_tokens", bool(body.logprobs))
    return await answer.response(request, job, body)


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
        message = f"`messages` must hold at most {MAX_PICTURES} pictures, but hold {len(pictures)}. Drop some."
        raise ApiError(400, message, param="messages")
    return turns, pictures


def _picture(url: str) -> bytes:
    """Return the bytes in a data: URL.

    As browsers do, it takes any letter case, parameters such as a charset, line breaks, percent-encoding and base64
    without padding.

    Raises:
        ApiError: If it is not a data: URL in base64.
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


@final
class ChatAnswer(AnswerWriter):
    """Converts an answer to responses of this endpoint."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, result: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"message": message, "logprobs": self.logprobs(result.tokens, result.logprobs)}

    def first_piece(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(self, piece: AnswerPiece) -> dict[str, Any]:
        return {"delta": {"content": piece.text}, "logprobs": self.logprobs(piece.tokens, piece.logprobs)}

    def last_piece(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        """Return the log-probabilities of text tokens, if the client asked for them."""
        if not self.wants_logprobs:
            return None
        content = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": None if REPLACEMENT_CHARACTER in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, logprob in self.token_texts(tokens, logprobs)
        ]
        return {"content": content, "refusal": None}
