"""What the two decoders of a translator read of some recordings, whatever came before them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from mmdec.nn.ctc_head import Heard


@dataclass(frozen=True)
class Source:
    """B recordings, as the graph and the autoregressive decoder read them."""

    states: Tensor  # (B, S, d)
    lengths: Tensor  # (B,) states; 0: nothing was heard
    sizes: Tensor  # (B,) what the graphs' sizes follow from: filterbank frames, or pieces that were heard
    limits: list[int]  # B: the most units that a translation may have
    heard: Heard | None = None  # what a CTC head wrote, where the translator has one

    def select(self, rows: list[int]) -> Source:
        """Some of the recordings."""
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
