"""Names the extra of mmdec that installs a missing package. A command imports what its extra installs when it runs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
# module -> its package, where the two names differ
PACKAGE_OF_MODULE = {"yaml": "pyyaml", "multipart": "python-multipart"}
DEVELOPER_EXTRAS = ("test", "docs")  # extras of developers, named only if no other has the package


def missing_extra(error: ImportError, preferred: str = "") -> str | None:
    """Return what a user must install if the import that failed is of an extra; else None.

    None means that the error is a fault.

    Args:
        preferred: An extra that is named if it is one of several with this package.
    """
    module = (error.name or "").partition(".")[0]
    package = PACKAGE_OF_MODULE.get(module, module).lower().replace("_", "-")
    extras = [extra for extra, packages in _extras() if package in packages]
    if not extras:
        return None
    extra = preferred if preferred in extras else extras[0]
    checkout = (CHECKOUT / "Makefile").is_file() and (CHECKOUT / "pyproject.toml").is_file()
    checkout_hint = "; in this checkout, .venv-dev has all extras (`make .venv-dev/ready`)" if checkout else ""
    return f"{package} is needed, but is not installed. Run `pip install 'mmdec[{extra}]'`{checkout_hint}."


def _extras() -> list[tuple[str, set[str]]]:
    """Return (extra, its packages) for all extras of mmdec, those of developers last."""
    try:
        names, requirements = metadata("mmdec").get_all("Provides-Extra") or [], requires("mmdec") or []
    except PackageNotFoundError:  # the package is imported from its folder, and was never installed
        return []
    named = [
        (match[1].lower().replace("_", "-"), extra)
        for text in requirements
        for match in [re.match(r"\s*([\w.-]+)", text)]
        for extra in names
        if match is not None and re.search(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""", text)
    ]
    ordered = sorted(names, key=lambda extra: extra in DEVELOPER_EXTRAS)
    return [(extra, {package for package, owner in named if owner == extra}) for extra in ordered]
