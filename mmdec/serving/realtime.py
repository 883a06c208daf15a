"""`/v1/realtime`: live transcription over a WebSocket, with the events of OpenAI's realtime transcription.

The client sends `input_audio_buffer.append` with 16-bit sound in base64. A window of speech ends with a pause, or with
`input_audio_buffer.commit`; then its text is final. While somebody speaks, each provisional text replaces the text
before. OpenAI has no event for provisional texts, so the server sends its own: `mmdec.transcription.provisional`.
"""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Annotated, Any, Literal, final

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from mmdec.serving.engines import LiveEngine, TranscriptionEngine, Updates
from mmdec.serving.server import ApiError, Server, server_of
from mmdec.whisper.live import LiveTranscriber, StreamUpdate

router = APIRouter(prefix="/v1")
RATE = 24_000  # sample rate in Hz if the session names no other rate
# maximum seconds of audio that wait for decoding; then the server stops reading from the socket
MAX_WAITING_SECONDS = 30.0
TRANSCRIPTION = "conversation.item.input_audio_transcription"


class Settings(BaseModel):
    """Settings of a session. Null is the same as a field that is left out."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class AudioFormat(Settings):
    type: str = "audio/pcm"
    rate: Any = None  # checked with the other options of a call


class TranscriptionSettings(Settings):
    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class InputSettings(Settings):
    format: AudioFormat = AudioFormat()
    transcription: TranscriptionSettings = TranscriptionSettings()


class AudioSettings(Settings):
    input: InputSettings = InputSettings()


class SessionSettings(Settings):
    audio: AudioSettings = AudioSettings()


class SessionUpdate(BaseModel):
    """The event with new settings, in the form of OpenAI's current API."""

    type: Literal["session.update"]
    session: SessionSettings


class AudioAppend(BaseModel):
    """The event with audio in base64."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class AudioCommit(BaseModel):
    """The event that ends a window of speech."""

    type: Literal["input_audio_buffer.commit"]


Event = SessionUpdate | AudioAppend | AudioCommit
EVENTS = TypeAdapter[Event](Annotated[Event, Field(discriminator="type")])


@final
class LiveSession:
    """One client's live transcription over a WebSocket.

    Holds its options, its transcriber, and audio that waits for decoding.
    """

    def __init__(self, socket: WebSocket, server: Server) -> None:
        self._socket, self._server = socket, server
        self._options: dict[str, Any] = {"sample_rate": RATE}
        self._engine = server.engine(socket.query_params.get("model"), TranscriptionEngine)
        self._live: LiveTranscriber | None = None
        self._before = 0.0  # seconds of audio in the session before the current transcriber's first sample
        self._items = 0
        self._sound = bytearray()  # bytes of audio that arrived and wait for decoding
        self._commits = self._ended = False
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Answer the client's events until it disconnects."""
        await self._send("session.created", session=self._session())
        feeding = asyncio.ensure_future(self._feed())
        try:
            while not self._ended:
                message = await self._receive()
                try:
                    await self._handle_event(_parse_event(message))
                except WebSocketDisconnect:
                    raise
                except Exception as error:
                    await self._refuse(error)
        except WebSocketDisconnect:
            pass
        finally:
            feeding.cancel()

    def _session(self) -> dict[str, Any]:
        options = {name: self._options.get(name) for name in ("language", "prompt")}
        form = {"type": "audio/pcm", "rate": self._options["sample_rate"]}
        return {"type": "transcription", "audio": {"input": {"format": form, "transcription": options}}}

    async def _receive(self) -> str | bytes:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        return message["bytes"] if text is None else text

    async def _send(self, kind: str, **content: Any) -> None:
        await self._socket.send_json({"type": kind, **content})

    async def _refuse(self, error: Exception) -> None:
        await self._send("error", **ApiError.from_error(error).content)

    async def _handle_event(self, event: Event) -> None:
        """Handle one event of the client: audio, a commit or new settings."""
        if isinstance(event, SessionUpdate):
            self._update(event.session)
            await self._send("session.updated", session=self._session())
        elif isinstance(event, AudioAppend):
            try:
                sound = base64.b64decode(event.audio, validate=True)
            except ValueError as error:  # also for characters outside ASCII
                raise ApiError(400, f"`audio` must be valid base64, but is not: {error}.", param="audio") from None
            max_bytes = MAX_WAITING_SECONDS * 2 * self._options["sample_rate"]
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._sound) < max_bytes or self._ended)
                self._sound += sound
                self._changed.notify_all()
        else:
            async with self._changed:
                self._commits = True
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._commits or self._ended)

    def _update(self, session: SessionSettings) -> None:
        """Apply the settings of a `session.update` event."""
        if self._live is not None or self._sound:
            raise ApiError(400, "`session` must be set before the sound begins.", param="session")
        form, wanted = session.audio.input.format, session.audio.input.transcription
        if form.type != "audio/pcm":
            raise ApiError(
                400,
                f"`format.type` must be 'audio/pcm', but is {form.type!r:.80}. Send 16-bit PCM.",
                param="session",
            )
        engine, options = self._engine, dict(self._options)
        if form.rate is not None:
            options["sample_rate"] = form.rate
        if wanted.model is not None:
            engine = self._server.engine(wanted.model, TranscriptionEngine)
        if wanted.language:
            options["language"] = wanted.language
        if wanted.prompt:
            options["prompt"] = wanted.prompt
        engine.live(**options)  # wrong options raise InputError here, before the session is changed
        self._engine, self._options = engine, options

    async def _feed(self) -> None:
        """Pass audio to the transcriber as it arrives, until the client disconnects."""
        try:
            while True:
                await self._forward_audio()
        except WebSocketDisconnect:
            pass
        finally:  # end the input in any case: otherwise `_handle_event`, which may wait for it, would not
            async with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def _forward_audio(self) -> None:
        """Wait for audio or a commit, then pass all audio that has arrived to the transcriber."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._sound or self._commits)
            sound, commits = bytes(self._sound), self._commits
            self._sound.clear()
            self._changed.notify_all()
        try:
            if self._live is None:
                self._live = self._engine.live(**self._options)
            if sound:
                await self._run(partial(self._live.feed, sound))
            if commits:
                await self._run(self._live.end)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            await self._refuse(error)
        if commits:
            async with self._changed:
                self._before += self._live.seconds if self._live is not None else 0.0
                self._live, self._commits = None, False
                self._changed.notify_all()

    async def _run(self, updates: Updates) -> None:
        """Have updates computed, and send each of them to the client at once.

        Args:
            updates: Begins to compute them.
        """
        model, feeding = self._server.name_of(self._engine), LiveEngine(self._engine)

        def count(update: StreamUpdate) -> None:
            self._server.metrics.count_result(feeding.task, update.transcript, update.transcript.seconds, model)

        job = feeding.job(updates, count)
        self._server.submit(job, model)
        try:
            while True:
                kind, value = await job.events.get()
                if kind == "text":
                    await self._send_update(value)
                elif kind == "error":
                    raise ApiError.from_error(value)
                else:
                    return
        finally:
            if job.decoding is not None:
                job.decoding.cancel()

    async def _send_update(self, update: StreamUpdate) -> None:
        item = f"item_{self._items}"
        times = {"start": round(self._before + update.start, 3), "end": round(self._before + update.end, 3)}
        if not update.final:
            await self._send("mmdec.transcription.provisional", item_id=item, text=update.text, **times)
            return
        self._items += 1
        await self._send("input_audio_buffer.committed", item_id=item)
        await self._send(f"{TRANSCRIPTION}.delta", item_id=item, content_index=0, delta=update.text)
        usage = {"type": "duration", "seconds": round(update.end - update.start, 3)}
        done = {"item_id": item, "content_index": 0, "transcript": update.text, "usage": usage}
        await self._send(f"{TRANSCRIPTION}.completed", **done, **times)


def _parse_event(message: str | bytes) -> Event:
    """Return the event in a message of the client.

    Raises:
        ApiError: If it has no known form.
    """
    try:
        return EVENTS.validate_json(message)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "union_tag_invalid":
            kind = first["input"]["type"]
            raise ApiError(400, f"`type` must be a known event, but is {kind!r:.80}.", param="type") from None
        param = ".".join(map(str, first["loc"][1:])) or None  # the first part is the event's type
        reason = f"{param or 'message'}: {first['msg']:.200}"
        raise ApiError(400, f"An event must be a JSON object of a known form ({reason}).", param=param) from None


@router.websocket("/realtime")
async def realtime(socket: WebSocket) -> None:
    """Serve one session of live transcription."""
    server = server_of(socket)
    await socket.accept()
    server.sessions += 1
    try:
        if server.sessions > server.limits.sessions:
            busy = server.busy("sessions", server.sessions, server.limits.sessions)
            await socket.send_json({"type": "error", **busy.content})
            await socket.close(1013)  # WebSocket's code for "try again later"
            return
        await LiveSession(socket, server).run()
    except ApiError as error:  # the client's address names a model that is not served
        await socket.send_json({"type": "error", **error.content})
        await socket.close(1008)
    finally:
        server.sessions -= 1
