"""Puts models/, demos/ and data/samples/ into the wheel as mmdec/_models, mmdec/_demos and mmdec/_samples. An editable
install reads the checkout."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ArtefactsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for name in ("models", "demos", "data/samples"):
            folder = Path(self.root, name)
            inside = f"_{folder.name}"
            for path in sorted(folder.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    build_data["force_include"][str(path)] = f"mmdec/{inside}/{path.relative_to(folder).as_posix()}"
