"""The autoregressive decoder of a speech translator as a target: it scores drafts of units, its output tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from mmdec.core.tree import root_only
from mmdec.daspeech.ar_decoder import ArCache, ArDecoder
from mmdec.daspeech.units import BOS
from mmdec.errors import InputError
from mmdec.kernels.kv_gather import kv_gather
from mmdec.targets.kv_cache import RowLayout
from mmdec.types import Context, Draft, EncoderContext, Needs, PrefillOutput, Scores, Verdict


@dataclass
class UnitSession:
    """The state of one decoding: the key-value cache, and where each batch row's tokens are in it."""

    cache: ArCache
    rows: RowLayout


@final
class UnitTarget:
    """Scores drafts of units (output tokens) with the translator's autoregressive decoder. Its prompt is <s>.

    The inputs of `prefill` are the encoder's `states` (B, S, d_memory) and their `state_lengths` (B,).
    """

    def __init__(self, decoder: ArDecoder) -> None:
        self.decoder, self.name = decoder, "units"
        self.vocab_size, self.hidden_size = decoder.embed_tokens.weight.shape

    @property
    def device(self) -> torch.device:
        """The device of the decoder."""
        return self.decoder.embed_tokens.weight.device

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> PrefillOutput[UnitSession]:
        """Run the decoder over the prompt <s>."""
        if needs.layers or needs.embeds:
            raise InputError("`drafter` must not need the unit decoder's features, but does. Use the graph's drafter.")
        states, sizes = inputs["states"], inputs["state_lengths"]
        tokens = torch.full((states.shape[0], 1), BOS, device=states.device)
        none = [0] * len(states)
        session = UnitSession(self.decoder.start(states, sizes, 64), RowLayout(none, none, none))
        draft = root_only(tokens[:, 0])
        scores = self.score(session, draft)
        where = torch.zeros_like(tokens)
        encoder = EncoderContext(states) if needs.encoder else None
        context = Context(tokens, tokens == BOS, where[None], where[:, 0], encoder=encoder)
        return PrefillOutput(session, context, draft, scores)

    def score(self, session: UnitSession, draft: Draft) -> Scores:
        """Run the decoder over the draft's trees in one pass.

        Returns:
            The logits (B, N, V) after each node.
        """
        rows, device = session.rows, draft.tokens.device
        tree, positions = rows.mask_and_positions(draft, session.cache.table.dtype)
        mask = None if tree is None else tree.additive
        rows.record_draft(draft.tokens.shape[1])
        return Scores(self.decoder.extend(draft.tokens, torch.tensor(positions, device=device), session.cache, mask))

    def commit(self, session: UnitSession, verdict: Verdict) -> None:
        """Move the accepted nodes to the end of their row in the cache, and drop the draft's other nodes."""
        columns, begins = session.rows.commit(verdict.path.tolist())
        for part in (part for pair in session.cache.self_pairs for part in pair):  # (B, H, size, D)
            kv_gather(part, columns, begins)
        session.cache.length = session.rows.width

    def select(self, session: UnitSession, live: Tensor) -> None:
        cache = session.cache
        cache.self_pairs = [(keys[live], values[live]) for keys, values in cache.self_pairs]
        cache.cross_pairs = [(keys[live], values[live]) for keys, values in cache.cross_pairs]
        if cache.mask is not None:
            cache.mask = cache.mask[live]
        session.rows.select(live.tolist())
        cache.length = session.rows.width
