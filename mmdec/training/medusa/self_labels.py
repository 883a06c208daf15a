"""A Whisper's own greedy text for windows, as labels for its heads, decoded in batches.

The text is what `generate` would give: the same prompts, suppressed tokens and timestamp rules. The caller passes the
encoder's states. The heads that are being trained draft; the text does not depend on them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from mmdec.decode.budget import Budget
from mmdec.decode.loop import decode
from mmdec.decode.sampling import Sequences, Stop
from mmdec.decode.tree import HeadAccuracy
from mmdec.decode.verify import MatchRule
from mmdec.drafters.medusa import Medusa, expected
from mmdec.nn.medusa import MedusaHeads
from mmdec.targets.whisper import WhisperTarget, generate_processors


def own_text(
    model: WhisperForConditionalGeneration,
    states: Tensor,
    prompts: Sequence[Sequence[int]],
    timed: Sequence[bool],
    limit: int,
    heads: MedusaHeads | None = None,
    nodes: int = 0,
) -> list[list[int]]:
    """Greedy tokens of each window, EOS included where it came.

    states (B, S, H) of the encoder; prompts: what the decoder reads first; timed: which windows are under the rules for
    timestamps; limit: new tokens at most, as far as the decoder's positions reach; heads draft `nodes` tokens a round.
    """
    drafter = shape = None
    if heads is not None and nodes > 0:
        shape = HeadAccuracy(expected(heads.config.heads))
        drafter = Medusa(
            copy.deepcopy(heads).to(model.dtype), model.proj_out
        )  # they are trained in a precision of their own
    texts: list[list[int]] = [[] for _ in prompts]
    for under_rules in (False, True):
        rows = [row for row, flag in enumerate(timed) if flag == under_rules]
        if not rows:
            continue
        ids, mask = _left_padded([prompts[row] for row in rows], int(model.config.pad_token_id or 0), states.device)
        longest = min(ids.shape[1] + limit, model.config.max_target_positions)
        stop = Stop(longest, frozenset(ends(model)))
        text = Sequences(ids, stop, generate_processors(model, ids.shape[1], under_rules))
        inputs: dict[str, Any] = {"input_ids": ids, "encoder_outputs": (states[rows],)}
        if not bool(mask.all()):
            inputs["decoder_attention_mask"] = mask
        budget = Budget.fixed(0) if shape is None else Budget.fixed(nodes, min(shape.depth, max(nodes - 1, 1)))
        for _ in decode(WhisperTarget(model), inputs, text, MatchRule(), drafter, budget, shape):
            pass
        for row, tokens in zip(rows, text.tokens, strict=True):
            texts[row] = tokens
    return texts


def ends(model: WhisperForConditionalGeneration) -> list[int]:
    """Tokens that end a text."""
    end = model.generation_config.eos_token_id
    return list(end) if isinstance(end, list) else [int(end)]


def fingerprint(model: WhisperForConditionalGeneration, with_path: bool = False) -> str:
    """Tells one model from another whose text may differ: by its sizes, its rules and some of each weight.

    with_path: as earlier releases wrote it into their checkpoints, where a copied model was another.
    """
    digest = hashlib.blake2b(digest_size=8)
    if with_path:
        digest.update(model.config.to_json_string(use_diff=False).encode())
    else:
        sizes = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
        digest.update(json.dumps(sizes, sort_keys=True, default=str).encode())
    digest.update(json.dumps(model.generation_config.to_dict(), sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        numbers = weight.flatten()[:: max(1, weight.numel() // 512)]
        digest.update(name.encode() + numbers.double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
