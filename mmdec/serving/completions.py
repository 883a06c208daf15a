"""`/v1/completions`: continues texts; and what its requests and answers share with those of chats."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mmdec.serving.answers import Answer, AnswerPiece
from mmdec.serving.engines import DialogueEngine, TextEngine
from mmdec.serving.job import Job
from mmdec.serving.server import ApiError, EventStream, Server, api_note, confidence_warning, server_of
from mmdec.tasks.confidence import CUT_CONFIDENCE

router = APIRouter(prefix="/v1")
# Fields that would change the answer, and that nothing here can do: name -> (values that ask for nothing, what is
# lacking). Null asks for nothing either.
Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
UNSUPPORTED: Unsupported = {
    "best_of": ((1,), "a request has one answer"),
    "echo": ((False,), "the prompt is not repeated"),
    "frequency_penalty": ((0,), "tokens are not penalised"),
    "logit_bias": (({},), "tokens are not favoured"),
    "n": ((1,), "a request has one answer"),
    "presence_penalty": ((0,), "tokens are not penalised"),
    "suffix": (("",), "nothing is written in front of a text"),
}


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class CompletionRequest(BaseModel):
    """The fields that requests for a text and for a chat have in common.

    Null is the same as a field that is left out. Other fields than these are refused, because they might change the
    answer.
    """

    model_config = ConfigDict(extra="forbid")
    unsupported: ClassVar[Unsupported]

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # fields that do not change the answer: about accounts, storage, caches and speed
    metadata: Any = None
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
        fields = {name: value for name, value in body.items() if value is not None}
        for name, (neutral, lack) in cls.unsupported.items():
            value = fields.pop(name, neutral[0])
            if not any(
                value == default and isinstance(value, bool) == isinstance(default, bool) for default in neutral
            ):
                raise ApiError(400, f"`{name}` must be left out: {lack}.", code="unsupported_parameter", param=name)
        return fields

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings at which the text ends."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ()))

    def options(self, server: Server, wanted: int | None) -> dict[str, Any]:
        """Return the arguments of `generate`.

        Args:
            wanted: The client's maximum of new tokens.
        """
        limit = server.limits.answer_tokens
        if self.top_p == 0:  # the most likely token alone
            sampled = False
        elif self.temperature is not None:
            sampled = self.temperature > 0
        else:  # no temperature given: the settings of the model decide whether to sample
            sampled = True if self.top_p is not None and self.top_p < 1 else None
        return {
            "max_new_tokens": min(wanted or limit, limit),
            "do_sample": sampled,
            "temperature": self.temperature or None,
            "top_p": None if sampled is False else self.top_p,
            "seed": None if sampled is False or self.seed is None else self.seed % 2**63,
            "stop_strings": self.stop_strings or None,
        }


class AnswerWriter(ABC):
    """Converts one request's answer to responses in OpenAI's format. Holds what all responses of the request share.

    Args:
        server: Has the limits.
        engine: Of the model.
        prompt: Number of prompt tokens.
        wanted: The client's maximum of new tokens; None: it set none.
        length_field: The request's field for it.
        wants_logprobs: Whether the client asked for log-probabilities.
    """

    prefix: ClassVar[str]  # of the response's id
    kind: ClassVar[str]  # the field "object" of a whole response
    chunk_kind: ClassVar[str]  # and of a part of a stream

    def __init__(
        self,
        server: Server,
        engine: DialogueEngine[Any],
        prompt: int,
        wanted: int | None,
        length_field: str,
        wants_logprobs: bool,
    ) -> None:
        limit = server.limits.answer_tokens
        self._server, self._engine, self._prompt, self.wants_logprobs = server, engine, prompt, wants_logprobs
        self._by_client = wanted is not None and wanted <= limit
        self._remedy = f"; set {length_field}" if (wanted or limit) < limit else ", the server's maximum"
        name = server.name_of(engine)
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self._special = set(engine.tokenizer.all_special_ids)

    @abstractmethod
    def choice(self, result: Answer) -> dict[str, Any]:
        """Return the fields of a whole response's choice."""

    @abstractmethod
    def piece(self, piece: AnswerPiece) -> dict[str, Any]:
        """Return the fields of a choice with a piece of text."""

    @abstractmethod
    def last_piece(self) -> dict[str, Any]:
        """Return the fields of a stream's last choice, which says why the text ends."""

    def first_piece(self) -> dict[str, Any] | None:
        """Return the fields of a stream's first choice, before all text; None: there is none."""
        return None

    async def response(self, request: Request, job: Job, body: CompletionRequest) -> Response:
        """Decode a job, and make the response that the request asks for."""
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return await EventStream.from_events(self._chunks(request, job, usage))
        result: Answer = await self._server.result(request, job)
        choice = {"index": 0, **self.choice(result), "finish_reason": result.finish_reason}
        content = {**self._head, "object": self.kind, "choices": [choice], "usage": self._usage(result)}
        return JSONResponse(content | self._confidence_fields(result))

    async def _chunks(self, request: Request, job: Job, usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a streamed response, each as a dict.

        Args:
            usage: Whether a last chunk with the token counts follows.
        """
        job.streams, first = True, self.first_piece()
        async for kind, value in self._server.events(request, job):
            if first is not None:
                yield self._chunk(first)
                first = None
            if kind == "result":
                yield self._chunk(self.last_piece(), value.finish_reason) | self._confidence_fields(value)
                if usage:
                    yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage(value)}
            elif value.text or self.wants_logprobs:
                yield self._chunk(self.piece(value))

    def _chunk(self, fields: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **fields, "finish_reason": reason}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def token_texts(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[tuple[str, float]]:
        """Return the text and the log-probability of each token, special ones left out."""
        decode = self._engine.tokenizer.decode
        pairs = zip(tokens, logprobs, strict=True)
        return [(decode([token]), logprob) for token, logprob in pairs if token not in self._special]

    def _confidence_fields(self, result: Answer) -> dict[str, Any]:
        """Return the fields about an answer's confidence, and its note."""
        cut = result.finish_reason == "length"
        fields: dict[str, Any] = {"note": api_note(result.note, self._remedy)} if cut else {}
        if result.confidence is None:
            return fields
        sure = min(result.confidence, CUT_CONFIDENCE) if cut and not self._by_client else result.confidence
        return {"confidence": sure} | fields | confidence_warning(sure, self._engine.calibrated)

    def _usage(self, result: Answer) -> dict[str, int]:
        written = len(result.tokens)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": written,
            "total_tokens": self._prompt + written,
        }


@final
class TextRequest(CompletionRequest):
    """The body of a request."""

    unsupported = UNSUPPORTED

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    # 0: the log-probabilities of the answer's tokens; those of other tokens are not returned
    logprobs: Annotated[int | None, Field(ge=0, le=0)] = None


@router.post("/completions", response_model=None)
async def completions(request: Request, body: TextRequest) -> Response:
    """Continue a text, as the model's tokenizer reads it: special tokens in it are special."""
    server = server_of(request)
    engine = server.engine(body.model or None, TextEngine)
    text = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    prompt = await server.read(partial(engine.read_text, text))
    job = engine.job(prompt, **body.options(server, body.max_tokens))
    wants_logprobs = body.logprobs is not None
    answer = TextAnswer(server, engine, prompt.tokens, body.max_tokens, "max_tokens", wants_logprobs)
    return await answer.response(request, job, body)


@final
class TextAnswer(AnswerWriter):
    """Converts an answer to responses of this endpoint."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    _written = 0  # number of characters that were sent

    def choice(self, result: Answer) -> dict[str, Any]:
        return self.piece(AnswerPiece(result.text, result.tokens, result.logprobs))

    def piece(self, piece: AnswerPiece) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": self._logprobs(piece)}

    def last_piece(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(self, piece: AnswerPiece) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        texts, offsets = self.token_texts(piece.tokens, piece.logprobs), list[int]()
        for text, _ in texts:
            offsets.append(self._written)
            self._written += len(text)
        return {
            "tokens": [text for text, _ in texts],
            "token_logprobs": [logprob for _, logprob in texts],
            "top_logprobs": None,
            "text_offset": offsets,
        }
