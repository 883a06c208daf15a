"""A visitor of the demo without a browser: it sends the HTTP requests that the page's script would send."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

SECONDS = 600.0  # time limit of an answer


class Visitor:
    """One session. address: the page's, with a slash at its end."""

    def __init__(self, address: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=SECONDS)
        self.session = uuid.uuid4().hex
        self.config: dict[str, Any] = self.client.get("config").json()
        self._components = {part["id"]: part for part in self.config["components"]}

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def event(self, label: str) -> dict[str, Any]:
        """Return the description of the event that the button with this label starts on the server."""
        for dependency in self.config["dependencies"]:
            for target, kind in dependency["targets"]:
                named = self._components.get(target, {}).get("props", {}).get("value") == label
                if kind == "click" and named and dependency["backend_fn"] and dependency["queue"]:
                    return dependency
        raise AssertionError(f"no button {label}")

    def values(self, event: dict[str, Any]) -> list[Any]:
        """Return the initial values of the event's inputs."""
        return [self._components[number]["props"].get("value") for number in event["inputs"]]

    def press(self, label: str, values: list[Any] | None = None) -> str:
        """Press a button. Returns the event's id."""
        event = self.event(label)
        body = {
            "data": self.values(event) if values is None else values,
            "fn_index": event["id"],
            "session_hash": self.session,
            "trigger_id": event["targets"][0][0],
        }
        answer = self.client.post("gradio_api/queue/join", json=body)
        answer.raise_for_status()
        return answer.json()["event_id"]

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the server's messages on this session's events, until all have ended."""
        with self.client.stream(
            "GET", "gradio_api/queue/data", params={"session_hash": self.session}, timeout=SECONDS
        ) as lines:
            for line in lines.iter_lines():
                if line.startswith("data:"):
                    message = json.loads(line[5:])
                    yield message
                    if message["msg"] == "close_stream":
                        return

    def cancel(self, label: str, event_id: str) -> None:
        """Stop an event, as the page's Stop button does."""
        body = {"session_hash": self.session, "fn_index": self.event(label)["id"], "event_id": event_id}
        self.client.post("gradio_api/cancel", json=body).raise_for_status()

    def upload(self, path: Path) -> dict[str, Any]:
        """Upload a file. Returns it as an input's value."""
        with path.open("rb") as file:
            answer = self.client.post("gradio_api/upload", files={"files": (path.name, file)})
        answer.raise_for_status()
        return {"path": answer.json()[0], "orig_name": path.name, "meta": {"_type": "gradio.FileData"}}
