"""The input of a translator's two decoders, in the same form for every kind of encoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from mmdec.nn.ctc_head import Heard


@dataclass(frozen=True)
class Source:
    """B encoded recordings: the input of the graph decoder and the autoregressive decoder."""

    states: Tensor  # (B, S, d)
    lengths: Tensor  # (B,) number of states; 0: the transcript is empty
    sizes: Tensor  # (B,) filterbank frames, or pieces of the transcript: they set the graphs' sizes
    limits: list[int]  # for each recording, the maximum units of its translation
    heard: Heard | None = None  # the CTC head's transcripts; None: the translator has no such head

    def select(self, rows: list[int]) -> Source:
        """Only the recordings in these rows, in that order."""
        heard = None if self.heard is None else self.heard.select(rows)
        limits = [self.limits[row] for row in rows]
        return replace(
            self,
            states=self.states[rows],
            lengths=self.lengths[rows],
            sizes=self.sizes[rows],
            limits=limits,
            heard=heard,
        )
