"""English speech: flite's voice slt, and the phones it says with their exact end times."""

import os
import subprocess
from pathlib import Path

VOICE = "slt"


def synthesise(text: str, path: Path) -> str:
    """Write `text` as 16 kHz PCM16 to `path`, whole or not at all; gives "phone:END phone:END ..." in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    command = ["flite", "-voice", VOICE, "-psdur", "-t", text, "-o", str(partial)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    if ":" not in output or partial.stat().st_size < 3200:
        raise RuntimeError(f"flite gave no sound for {text!r}")
    os.replace(partial, path)
    return output


def phones_of(text: str) -> list[str]:
    """The phones of `text` said on its own, pauses left out."""
    command = ["flite", "-voice", VOICE, "-ps", "-t", text, "-o", "none"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [phone for phone in output.split() if phone != "pau"]


def phones_in(alignment: str) -> list[str]:
    """The phones of an alignment line, pauses left out."""
    phones = [item.rpartition(":")[0] for item in alignment.split()]
    return [phone for phone in phones if phone != "pau"]
