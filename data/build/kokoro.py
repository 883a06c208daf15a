"""Natural French voices: Kokoro-82M (hexgrad, Apache-2.0) through its ONNX export; phones by the program espeak-ng.

A voice is a mixture of Kokoro's styles, given by its shares: `{"ff_siwis": 0.6, "am_echo": 0.4}`. The network reads
phones in an alphabet of its own, a style that depends on how many phones there are, and a speed; it gives 24 kHz
samples.
"""

import json
import re
import subprocess
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

RATE = 24_000
MAX_PHONES = 509  # the network's window is 512, with a pad at either end
MODEL, SIGNS, STYLES = "kokoro-v1.0.int8.onnx", "vocab.json", "voices.npz"

_LANGUAGE_SWITCH = re.compile(r"\([a-z^-]+\)")  # espeak-ng marks words that it reads by another language's rules
_CLAUSE = re.compile(r"([.,;:!?]+|\.\.\.)")
# Phones that espeak-ng writes with two signs and Kokoro with one.
_TIED = {"tʃ": "ʧ", "dʒ": "ʤ", "ts": "ʦ", "dz": "ʣ", "eɪ": "A", "aɪ": "I", "aʊ": "W", "oʊ": "O", "əʊ": "Q", "ɔɪ": "Y"}
# Phones of English words within French that Kokoro's alphabet lacks.
_NEAR = {"ɚ": "əɹ", "ɝ": "ɜɹ", "ɫ": "l", "g": "ɡ", "r": "ʁ"}


def to_alphabet(phones: str) -> str:
    """espeak-ng's phones of a clause in Kokoro's alphabet.

    Hyphens, which mark words said as one, and marks of language go; what is tied by "^" becomes one sign.
    """
    phones = _LANGUAGE_SWITCH.sub("", phones)
    for pair, sign in _TIED.items():
        phones = phones.replace("^".join(pair), sign)
    for old, new in _NEAR.items():
        phones = phones.replace(old, new)
    return " ".join(re.sub(r"[-_^]", "", phones).split())


def espeak_phones(clauses: list[str], language: str = "fr-fr") -> list[str]:
    """What espeak-ng says of each clause, in its own IPA, "^" between the signs of one phone."""
    # An empty line ends a clause: without it the next one would change how this one's last word is said.
    text = "\n\n".join(clauses) + "\n"
    command = ["espeak-ng", "-q", "-v", language, "--ipa", "--tie=^", "--stdin"]
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if len(lines) != len(clauses):  # a clause that it divides further: one at a time
        return [" ".join(espeak_whole(clause, language).split()) for clause in clauses]
    return lines


def espeak_whole(clause: str, language: str) -> str:
    """The same for one clause, however many lines espeak-ng makes of it."""
    command = ["espeak-ng", "-q", "-v", language, "--ipa", "--tie=^", "--", clause]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def phones_of(text: str, language: str = "fr-fr") -> str:
    """The phones of a sentence in Kokoro's alphabet, its marks kept: they make the melody. language: espeak-ng's."""
    parts = _CLAUSE.split(re.sub(r'["()]', "", text))
    said = [part.strip() for part in parts[::2]]
    marks = [*(mark[:1] for mark in parts[1::2]), ""]
    spoken = iter(espeak_phones([clause for clause in said if clause], language))
    joined = "".join(
        (to_alphabet(next(spoken)) if clause else "") + mark + (" " if mark else "")
        for clause, mark in zip(said, marks, strict=True)
    )
    return (joined if language.startswith("fr") else joined.replace("ʁ", "r")).strip()


def session(model: str | bytes) -> Any:
    """A session of onnxruntime, which is imported here: voices can be planned without it. One thread. model: a path, or
    a file's content."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Kokoro:
    """The network and its styles. One thread.

    folder: kokoro-v1.0.int8.onnx, vocab.json ({"vocab": {sign: number}}) and voices.npz (a style a name, (510, 1, 256):
    one row for each number of phones).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers: dict[str, int] = json.loads((folder / SIGNS).read_text(encoding="utf-8"))["vocab"]
        with np.load(folder / STYLES) as data:
            self.styles = {name: data[name].reshape(-1, 256).astype(np.float32) for name in data.files}

    @cached_property
    def network(self) -> Any:
        return session(str(self.folder / MODEL))

    def style(self, shares: Mapping[str, float], phones: int) -> np.ndarray:
        """The mixed style for so many phones, (1, 256)."""
        total = sum(shares.values())
        mixed = sum(self.styles[name][phones] * np.float32(share / total) for name, share in shares.items())
        return np.asarray(mixed, np.float32)[None]

    def speak(self, phones: str, shares: Mapping[str, float], speed: float) -> np.ndarray:
        """(T,) float32 at 24 kHz. Raises ValueError for a sign that it does not know, or too many of them."""
        unknown = {sign for sign in phones if sign not in self.numbers}
        if unknown or not 0 < len(phones) <= MAX_PHONES:
            raise ValueError(f"{len(phones)} phones, of them unknown: {' '.join(sorted(unknown)) or 'none'}: {phones}")
        tokens = np.array([[0, *(self.numbers[sign] for sign in phones), 0]], np.int64)
        inputs = {"tokens": tokens, "style": self.style(shares, len(phones)), "speed": np.array([speed], np.float32)}
        return np.asarray(self.network.run(None, inputs)[0], np.float32).reshape(-1)
