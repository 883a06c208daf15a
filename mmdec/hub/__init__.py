"""Models on disk: found by name, path or hub id; read into parts; written whole or not at all. Safetensors only."""

from mmdec.hub.daspeech import DEFAULT_MODEL, resolve, save_model
from mmdec.hub.find import demo_file, find, kind, names

__all__ = ["DEFAULT_MODEL", "demo_file", "find", "kind", "names", "resolve", "save_model"]
