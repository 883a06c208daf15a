"""Reads odd pictures in a separate process, and writes the result of `read_image` for each as a JSON line."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from mmdec.errors import InputError
from mmdec.io.images import read_image
from tests.support.odd_images import write_odd_image

SECONDS = 60  # time limit of one file


def main(folder: Path, first: int, last: int, seed: int, written: Path) -> None:
    """Read the odd pictures with the numbers first ... last - 1. seed: of the other picture that is read before each.
    written: the file for the results."""
    before = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    with written.open("w", encoding="utf-8") as lines:
        for number in range(first, last):
            odd = write_odd_image(folder, number)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            read_image(before)
            wrong, answer = "", ""
            try:
                pixels = read_image(odd.path)
                answer = f"{pixels.shape} {hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest()}"
                if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
                    wrong = f"{pixels.dtype} {pixels.shape}"
                elif odd.pixels is not None and not np.array_equal(pixels, odd.pixels):
                    wrong = "other pixels"
            except InputError as error:
                answer = str(error)
                if odd.pixels is not None:
                    wrong = f"refused: {error}"
                elif not answer.isprintable() or len(answer) > 1000:
                    wrong = f"no one line: {answer[:200]!r}"
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            faulthandler.cancel_dump_traceback_later()
            read = not answer.startswith(("`image`", "image"))
            lines.write(
                json.dumps({"number": number, "story": odd.story, "answer": answer, "wrong": wrong, "read": read})
            )
            lines.write("\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
