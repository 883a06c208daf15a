"""Reads odd sound files in a separate process, because a decoder may hang, and writes each result as a JSON line.

`python -m tests.fuzz.fuzz_reader FOLDER FIRST LAST MODEL ANSWERS` writes to the file ANSWERS, because decoders may
print to stdout. A call of more than 20 s ends the process with a traceback.
"""

from __future__ import annotations

import faulthandler
import hashlib
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from mmdec.daspeech.translate import load_translator, translate_speech
from mmdec.daspeech.translator import SpeechTranslator
from mmdec.errors import InputError
from mmdec.io import audio
from mmdec.tasks.audio import read_audio
from tests.conftest import buzz
from tests.support.odd_files import Odd, write_odd

WATCHDOG = 20.0  # seconds


def sound_or_error(call) -> torch.Tensor | str:
    """Return the call's samples (T,), or the message of its InputError, whose form is checked. Other errors are
    raised."""
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    try:
        return call()
    except InputError as error:
        text = str(error)
        assert text.startswith("`"), text
        assert " must " in text, text
        assert "but" in text, text
        assert text.endswith("."), text
        text.encode()  # printable
        assert "\n" not in text, text
        return text
    finally:
        faulthandler.cancel_dump_traceback_later()


def same(a: torch.Tensor | str, b: torch.Tensor | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and a == b
    return torch.equal(a, b)


def examine(odd: Odd, other: Path, model: SpeechTranslator) -> dict[str, object]:
    """Read a file twice, each time after the file `other`, and list in "wrong" what is wrong with the results."""
    wrong = []
    audio.load_audio(other)
    first = sound_or_error(lambda: read_audio(odd.path))
    audio.load_audio(other)
    second = sound_or_error(lambda: read_audio(odd.path))
    if not same(first, second):
        wrong.append("another answer the second time")
    if os.path.isfile(odd.path):
        content = odd.path.read_bytes()
        bare = sound_or_error(lambda: read_audio(io.BytesIO(content)))
        if not isinstance(bare, str) and not same(bare, first):
            wrong.append("a file object gives other samples than the path")
    if isinstance(first, torch.Tensor):
        if not bool(torch.isfinite(first).all()):
            wrong.append("not finite")
        if first.abs().max() > 4:  # resampled noise goes somewhat beyond full scale
            wrong.append("beyond full scale")
        spoken = sound_or_error(lambda: torch.from_numpy(translate_speech(odd.path, model=model).audio))
        if isinstance(spoken, str) and "it found none in" not in spoken:
            wrong.append(f"read, but not translated: {spoken}")
    if odd.sound is not None:
        expected = audio.resample(torch.from_numpy(odd.sound), odd.rate)
        if isinstance(first, str):
            wrong.append(f"unharmed, but refused: {first}")
        elif len(first) != len(expected) or float((first - expected).abs().max()) > 2 * odd.error:
            wrong.append("unharmed, but other samples")
    answer = first if isinstance(first, str) else hashlib.sha256(first.numpy().tobytes()).hexdigest()
    return {"answer": answer, "read": not isinstance(first, str), "wrong": wrong}


def main(folder: str, first: str, last: str, model: str, answers: str) -> None:
    torch.set_num_threads(1)
    place = Path(folder)
    other = audio.save_audio(place / "other.wav", np.tile(buzz(3.0, 77), 4))
    translator = load_translator(model, "cpu")
    with open(answers, "w", encoding="utf-8", buffering=1) as out:
        for number in range(int(first), int(last)):
            odd = write_odd(place, number)
            print(json.dumps({"number": number, "story": odd.story}), file=out)
            try:
                verdict = examine(odd, other, translator)
            except Exception as error:
                verdict = {"answer": "", "read": False, "wrong": [f"{type(error).__name__}: {error}"]}
            print(json.dumps(verdict), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
