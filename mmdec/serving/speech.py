"""The endpoints `/v1/audio/...`: transcription, translation into English text, translation into English speech."""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, File, Form, Request, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BeforeValidator, Field

import mmdec
from mmdec.checks.arguments import format_value
from mmdec.io import audio
from mmdec.serving.engines import TranscriptionEngine, TranslationEngine
from mmdec.serving.job import Job
from mmdec.serving.server import ApiError, EventStream, Server, api_note, confidence_warning, server_of
from mmdec.tasks.audio import read_recording, with_note
from mmdec.tasks.options import option_help
from mmdec.whisper.options import TranscribeOptions

NULL = ("", "null")  # how a form says null


async def check_fields(request: Request) -> None:
    """Refuse a field of the form that the endpoint does not know, because the endpoint would silently ignore it.

    An empty field is the same as one that is left out.
    """
    known_fields = {field.alias for field in request.scope["route"].dependant.body_params}
    form_fields = (await request.form()).multi_items()
    name = next((name for name, value in form_fields if name not in known_fields and value not in NULL), None)
    if name is not None:
        raise ApiError(
            400, f"`{name}` is not known here. Leave it out; known are {', '.join(sorted(known_fields))}.", param=name
        )


router = APIRouter(prefix="/v1/audio", dependencies=[Depends(check_fields)])
Nullable = BeforeValidator(lambda value: None if value in NULL else value)
ResponseFormat = Literal["json", "verbose_json", "text", "srt", "vtt"]
Format = Annotated[ResponseFormat | None, Nullable, Form(description="Default: json.")]
TIMED = ("verbose_json", "srt", "vtt")
SOUNDS = {"wav": "audio/wav", "flac": "audio/flac", "ogg": "audio/ogg", "mp3": "audio/mpeg"}
Recording = Annotated[UploadFile, File(description="wav, flac, ogg, mp3; with PyAV also mp4, m4a, webm.")]
Model = Annotated[str | None, Nullable, Form(description="One of /v1/models. Default: the first that can do this.")]
Strict = Annotated[bool | None, Nullable, Form(description=option_help(TranscribeOptions, "strict"))]
Temperature = Annotated[
    Annotated[float, Field(ge=0, le=1)] | None, Nullable, Form(description="0 is greedy, and the default.")
]
Granularities = Annotated[
    list[Annotated[Literal["word", "segment"] | None, Nullable]] | None, Form(alias="timestamp_granularities[]")
]


@router.post("/transcriptions", response_model=None)
async def transcriptions(
    request: Request,
    file: Recording,
    model: Model = None,
    language: Annotated[str | None, Nullable, Form(description=option_help(TranscribeOptions, "language"))] = None,
    prompt: Annotated[str | None, Form(description=option_help(TranscribeOptions, "prompt"))] = None,
    response_format: Format = None,
    temperature: Temperature = None,
    granularities: Granularities = None,
    stream: Annotated[bool | None, Nullable, Form(description="Server-sent events, text as it is accepted.")] = None,
    chunking_strategy: Annotated[
        Literal["auto"] | None, Nullable, Form(description="The server always divides long recordings by itself.")
    ] = None,
    strict: Strict = None,
) -> Response:
    """Transcribe speech in its own language."""
    server = server_of(request)
    engine = server.engine(model, TranscriptionEngine)
    kind = response_format or "json"
    timed = {*filter(None, granularities or ())} or {"segment"} if kind in TIMED else set()
    recording = await _read(server, file, strict, silence=True)
    timestamps = "word" if "word" in timed else "segment" if timed else None
    read = partial(
        engine.read_speech,
        recording.samples,
        language=language,
        prompt=prompt,
        temperature=temperature or None,
        timestamps=timestamps,
    )
    job = engine.job(await server.read(read))
    if stream:
        if kind not in ("json", "text"):
            raise ApiError(400, "`stream` must be left out for a format with times.", param="stream")
        return await EventStream.from_events(_deltas(server, request, job, recording.note))
    result = with_note(await server.result(request, job), recording.note)
    return _format_response(result, kind, "transcribe", timed, temperature or 0.0)


@router.post("/translations", response_model=None)
async def translations(
    request: Request,
    file: Recording,
    model: Model = None,
    prompt: Annotated[str | None, Form(description="English text that might have come before.")] = None,
    response_format: Format = None,
    temperature: Temperature = None,
    strict: Strict = None,
) -> Response:
    """Translate speech into English text, with a speech translator or a multilingual transcriber."""
    server, kind = server_of(request), response_format or "json"
    engine = server.engine(model, TranslationEngine, TranscriptionEngine)
    if isinstance(engine, TranslationEngine):
        if kind not in ("json", "text"):
            message = f"`response_format` must be json or text for this model, but is {kind}."
            raise ApiError(400, message, param="response_format")
        if prompt or temperature:
            name, value = ("prompt", prompt) if prompt else ("temperature", temperature)
            message = f"`{name}` must be left out for this model, but is {format_value(value)}."
            raise ApiError(400, message, param=name)
        recording = await _read(server, file, strict)
        result = await server.result(request, engine.job(recording.samples))
        if kind == "text":
            return PlainTextResponse(result.text, headers=_note(recording.note))
        return JSONResponse({"text": result.text} | _field(recording.note))
    if not engine.translates and model is None:
        able = (
            engine for engine in server.models.values() if isinstance(engine, TranscriptionEngine) and engine.translates
        )
        engine = next(able, engine)
    if not engine.translates:
        raise ApiError(
            400,
            "`model` must translate into English, but this one only transcribes. Use a multilingual Whisper.",
            param="model",
        )
    timed = {"segment"} if kind in TIMED else set[str]()
    recording = await _read(server, file, strict, silence=True)
    read = partial(
        engine.read_speech,
        recording.samples,
        task="translate",
        prompt=prompt,
        temperature=temperature or None,
        timestamps="segment" if timed else None,
    )
    job = engine.job(await server.read(read))
    result = with_note(await server.result(request, job), recording.note)
    return _format_response(result, kind, "translate", timed, temperature or 0.0)


@router.post("/translations/speech", response_model=None)
async def spoken_translations(
    request: Request,
    file: Recording,
    model: Model = None,
    response_format: Annotated[
        Literal["wav", "flac", "ogg", "mp3"] | None, Nullable, Form(description="Default: wav.")
    ] = None,
    strict: Strict = None,
) -> Response:
    """Translate French speech into English speech. The header `X-Text` has the English text, percent-encoded."""
    server = server_of(request)
    engine = server.engine(model, TranslationEngine)
    recording = await _read(server, file, strict)
    result: mmdec.Translation = await server.result(request, engine.job(recording.samples))
    kind = response_format or "wav"
    content = await asyncio.to_thread(_sound, result, kind)
    headers = {"X-Text": quote(result.text), "X-Confidence": f"{result.confidence:.3f}"} | _note(recording.note)
    return Response(content, media_type=SOUNDS[kind], headers=headers)


async def _read(server: Server, file: UploadFile, strict: bool | None, silence: bool = False) -> audio.Recording:
    """Read an uploaded file as 16 kHz mono samples (T,), with a note about what could not be read.

    Args:
        silence: Whether a silent recording is accepted.

    Raises:
        InputError: If the file is no readable recording.
    """
    content = await file.read()
    limit = server.limits.audio_seconds
    return await server.read(partial(read_recording, content, max_seconds=limit, silence=silence, strict=bool(strict)))


def _note(note: str) -> dict[str, str]:
    """Return the header `X-Note`, percent-encoded, for a response without a field for the note; {} without a note."""
    return {"X-Note": quote(note)} if note else {}


def _field(note: str) -> dict[str, Any]:
    """Return a JSON object's field `note`; {} without a note."""
    return {"note": note} if note else {}


def _sound(result: mmdec.Translation, kind: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="mmdec-serve-") as folder:
        return result.save(Path(folder) / f"speech.{kind}").read_bytes()


async def _deltas(server: Server, request: Request, job: Job, note: str) -> AsyncIterator[dict[str, Any]]:
    job.streams = True
    async for kind, value in server.events(request, job):
        if kind == "text":
            yield {"type": "transcript.text.delta", "delta": value}
        else:
            usage = {"type": "duration", "seconds": round(value.seconds, 3)}
            noted = api_note(with_note(value, note).note)
            done = {"type": "transcript.text.done", "text": value.text, "usage": usage}
            yield done | _field(noted) | confidence_warning(value.confidence, value.calibrated)


def _format_response(
    result: mmdec.Transcript, kind: ResponseFormat, task: str, timed: set[str], temperature: float
) -> Response:
    """Convert a transcript to a response in one of OpenAI's formats.

    Args:
        kind: The format.
        task: "transcribe" or "translate".
        timed: Which times the client asked for: "word", "segment".
        temperature: The sampling temperature, which is part of the response.
    """
    note = api_note(result.note)
    if kind == "text":
        return PlainTextResponse(result.text + "\n", headers=_note(note))
    if kind in ("srt", "vtt"):
        return PlainTextResponse(result.format(kind), headers=_note(note))
    usage = {"type": "duration", "seconds": round(result.seconds, 3)}
    unlikely = confidence_warning(result.confidence, result.calibrated)
    if kind == "json":
        return JSONResponse({"text": result.text, "usage": usage} | _field(note) | unlikely)
    content: dict[str, Any] = {
        "task": task,
        "language": result.language,
        "duration": round(result.seconds, 3),
        "text": result.text,
        "confidence": result.confidence,
        "finish_reason": result.finish_reason,
        "usage": usage,
        **_field(note),
        **unlikely,
    }
    if "word" in timed:
        words = [word for segment in result.segments for word in segment.words or ()]
        content["words"] = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]
    if "segment" in timed:
        content["segments"] = [
            {
                "id": index,
                "start": segment.start,
                "end": segment.end,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": temperature,
                "compression_ratio": _compression(segment.text),
            }
            for index, segment in enumerate(result.segments)
        ]
    return JSONResponse(content)


def _compression(text: str) -> float:
    """Return a text's compression ratio (bytes before and after zlib); it is high for a text that repeats itself.

    References:
        Radford et al. 2022, section 4.5.
    """
    content = text.encode()
    return round(len(content) / len(zlib.compress(content)), 3)
