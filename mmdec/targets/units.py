"""The autoregressive unit decoder of a speech translator as a target: it verifies drafts over the encoder's states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from mmdec.decode.tree import ancestors, single
from mmdec.nn.ar_decoder import ArCache, ArDecoder
from mmdec.nn.dag_decoder import BOS
from mmdec.types import Context, Draft, InputError, Needs, Scores, Verdict


@dataclass
class UnitSession:
    """One run. A row's keys lie at 0 ... lengths-1; a pass appends its nodes behind the longest row's."""

    cache: ArCache
    lengths: Tensor  # (B,) of what is committed
    end: int = 0  # columns in use before the pass: the longest row's
    ragged: bool = False


@final
class UnitTarget:
    """prefill takes `states` (B, S, d_memory) and `state_lengths` (B,); the prompt is <s>."""

    def __init__(self, decoder: ArDecoder, name: str = "units") -> None:
        self.decoder, self.name = decoder, name
        self.vocab_size, self.hidden_size = decoder.embed_tokens.weight.shape

    @property
    def device(self) -> torch.device:
        return self.decoder.embed_tokens.weight.device

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> tuple[UnitSession, Context, Draft, Scores]:
        if needs.layers or needs.embeds:
            raise InputError("`drafter` must need no features of the unit decoder, but does. Use the lattice.")
        states, sizes = inputs["states"], inputs["state_lengths"]
        tokens = torch.full((states.shape[0], 1), BOS, device=states.device)
        session = UnitSession(self.decoder.start(states, sizes, 64), torch.zeros_like(tokens[:, 0]))
        draft = single(tokens[:, 0])
        scores = self.score(session, draft)
        where = torch.zeros_like(tokens)
        context = Context(tokens, tokens == BOS, where[None], where[:, 0], memory=states if needs.memory else None)
        return session, context, draft, scores

    def score(self, session: UnitSession, draft: Draft) -> Scores:
        """One pass over the tree: (B, N, V)."""
        seen = ancestors(draft.parents)
        depth = seen.sum(2) - 1
        first = torch.arange(session.end, device=self.device) < session.lengths[:, None]  # (B, end)
        visible = torch.cat([first[:, None].expand(-1, draft.tokens.shape[1], -1), seen], 2)
        mask = torch.zeros(visible.shape, device=self.device).masked_fill(~visible, -1e9)[:, None]
        places = session.lengths[:, None] + depth
        return Scores(self.decoder.extend(draft.tokens, places, session.cache, mask))

    def commit(self, session: UnitSession, verdict: Verdict) -> None:
        """Each row's accepted nodes move to where its own keys end."""
        path, kept = verdict.path, (verdict.path >= 0).sum(1)
        start, own = session.end, session.lengths
        width = path.shape[1]
        steps = torch.arange(width, device=path.device)
        session.lengths = own + kept
        session.end = int(session.lengths.max())
        if bool(((path == steps) | (path < 0)).all()) and bool((own == start).all()):
            session.cache.length = session.end
            return
        source = start + path.clamp(min=0)  # beyond a path its root is copied, to where nothing is read
        goal = own[:, None] + steps
        for keys, values in session.cache.own:
            for part in (keys, values):  # (B, H, size, D)
                index = source[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
                moved = part.gather(2, index)
                part.scatter_(2, goal[:, None, :, None].expand_as(index), moved)
        session.cache.length = session.end

    def select(self, session: UnitSession, live: Tensor) -> None:
        cache = session.cache
        cache.own = [(keys[live], values[live]) for keys, values in cache.own]
        cache.memories = [(keys[live], values[live]) for keys, values in cache.memories]
        if cache.mask is not None:
            cache.mask = cache.mask[live]
        session.lengths = session.lengths[live]
        session.end = cache.length = int(session.lengths.max())
