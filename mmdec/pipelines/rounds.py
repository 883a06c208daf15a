"""The round as callers of `transcribe` and `describe` hear of it (`on_round`)."""

from mmdec.decode.loop import Round as Round
