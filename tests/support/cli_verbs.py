"""The verbs of the command line."""

from __future__ import annotations

VERBS = [
    "",
    *("translate", "transcribe", "describe", "train", "train drafter", "demo", "doctor", "info"),
    *("eval", "eval speech", "eval asr", "bench", "bench speech", "bench core", "bench asr"),
    *("eval vlm", "bench vlm", "bench kernels", "bench all", "bench show"),
    *("convert", "convert medusa", "convert hifigan", "convert daspeech", "convert drafter"),
    *("export", "export drafter"),
]
