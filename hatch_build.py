"""Puts models/ and data/samples/ into the wheel as mmdec/_models and mmdec/_samples. An editable
install reads the checkout.

What is hidden stays behind, as do models, and drafters inside a model's folder, without a card: they are unfinished.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ArtefactsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        build_data["force_include"] |= artefacts(Path(self.root))


def artefacts(root: Path) -> dict[str, str]:
    """Files of the checkout -> their paths in the wheel."""
    found: dict[str, str] = {}
    for name in ("models", "data/samples"):
        folder = root / name
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
            homes = [folder / home for home in inside.parents if home != Path(".")] if name == "models" else []
            if path.is_file() and not hidden and all((home / "README.md").is_file() for home in homes):
                found[str(path)] = f"mmdec/_{folder.name}/{inside.as_posix()}"
    return found
