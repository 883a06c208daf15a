"""Reads and writes the folder of a CTC head that drafts: config.json, model.safetensors and a model card.

model.safetensors holds the head's matrices in 8 bits (`mmdec.nn.int8`), the draft vocabulary, an n-gram of it, and the
BPE merges of the model's tokenizer, which convert the head's text to the model's tokens; so the folder needs no
tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.checks.arguments import check_path
from mmdec.checks.weights import (
    WEIGHTS_FILE,
    build_with_weights,
    read_settings,
    read_weights,
    report_damage,
    weight_file,
)
from mmdec.drafters.ctc.drafter import CtcDrafter
from mmdec.drafters.ctc.network import CtcHead, CtcHeadConfig
from mmdec.drafters.ctc.tokens import Merges, TokenPieces
from mmdec.drafters.fit import check_model_sizes
from mmdec.errors import InputError
from mmdec.hub.publish import write_model_folder
from mmdec.nn.int8 import pack_rows, unpack_rows
from mmdec.phonetics.piece_ngram import PieceNGram

SYSTEM = "ctc"
NGRAM_PREFIX = "ngram."  # of the names of the n-gram's tensors


@dataclass(frozen=True)
class CtcTokenIds:
    """The ids of the model's tokens that the drafter needs.

    Args:
        base: The model's name.
        languages: Ids of the tokens of the languages that the head was trained for; empty: all languages.
        refused: Ids of prompt tokens with which nothing is drafted, such as a task whose text is in another language.
    """

    first_time: int  # id of the timestamp token <|0.00|>
    end: int  # id of the end-of-text token
    vocab_size: int
    base: str = ""
    languages: Sequence[int] = ()
    refused: Sequence[int] = ()


def token_merges(tokenizer: Any) -> Merges:
    """Return the BPE merges of a byte-level tokenizer from transformers."""
    return Merges.from_json(json.loads(tokenizer.backend_tokenizer.to_str())["model"])


def save_ctc(
    directory: str | os.PathLike[str],
    head: CtcHead,
    pieces: TokenPieces,
    tokens: CtcTokenIds,
    ngram: PieceNGram | None = None,
    trained: str = "",
) -> Path:
    """Write the folder of a CTC head that drafts. If writing fails, no folder is left.

    Args:
        head: The trained head.
        pieces: The head's vocabulary.
        tokens: The model's token ids.
        ngram: A language model of the pieces, if there is one.
        trained: The head's training data in words, for the model card.
    """
    config = {
        "system": SYSTEM,
        "model_type": "mmdec-drafter",
        "head": asdict(head.config),
        "tokens": asdict(tokens),
    }
    known = {} if ngram is None else {NGRAM_PREFIX + name: array for name, array in ngram.arrays.items()}
    state = {**pack_rows(head.state_dict()), **_tables(pieces), **known}
    return write_model_folder(directory, config, state, _card(head, tokens, trained))


def load_ctc(directory: str | os.PathLike[str], model: PreTrainedModel) -> CtcDrafter:
    """Load a CTC drafter for a model, on the model's device and in the model's precision.

    Raises:
        InputError: If the folder is damaged, or the head belongs to another model (with other channels or tokens).
    """
    head, pieces, tokens, ngram = read_ctc(directory)
    shape: Any = getattr(model, "config", None)
    sizes = {
        "channels": (head.config.d_states, getattr(shape, "d_model", None)),
        "tokens": (tokens.vocab_size, getattr(shape, "vocab_size", None)),
    }
    check_model_sizes(sizes, tokens.base)
    head = head.to(model.device, model.dtype)
    return CtcDrafter(head, pieces, tokens.first_time, tokens.end, tokens.languages, tokens.refused, ngram)


def read_ctc(directory: str | os.PathLike[str]) -> tuple[CtcHead, TokenPieces, CtcTokenIds, PieceNGram | None]:
    """Read the folder of a CTC head.

    Returns:
        The head in float32 on the CPU, its vocabulary, the model's token ids, and the n-gram of its pieces, if it has
        one.

    Raises:
        InputError: If the folder is damaged.
    """
    folder = check_path("directory", directory, "Name a folder.")
    config = read_settings(folder / "config.json", "directory")
    if config.get("system") != SYSTEM:
        raise InputError(
            f"`directory` must hold a CTC head, but '{folder}' holds {config.get('system')!r:.60}. Name its folder."
        )
    state = read_weights([weight_file(folder, WEIGHTS_FILE, "directory")], "directory")
    with report_damage(
        f"`directory` must hold a whole CTC head, but '{folder}' is damaged or of another version", "Download it again."
    ):
        sizes, tokens = CtcHeadConfig(**config["head"]), CtcTokenIds(**config["tokens"])
        piece_tokens = state.pop("pieces").tolist()
        tables = [state.pop(name).numpy() for name in ("merges", "merged", "alphabet")]
        merges = _merges(*((table.tobytes(), table.dtype.str) for table in tables))
        if not all(token in merges for token in piece_tokens) or len(merges.alphabet) != 256:
            raise ValueError("the pieces are not tokens of the merges")
        pieces = TokenPieces(merges, piece_tokens)
        if len(pieces) != sizes.pieces or max(*piece_tokens, tokens.end, tokens.first_time) >= tokens.vocab_size:
            raise ValueError(f"{len(pieces)} pieces for a head of {sizes.pieces}")
        arrays = {name: state.pop(name) for name in list(state) if name.startswith(NGRAM_PREFIX)}
        arrays = {name.removeprefix(NGRAM_PREFIX): array for name, array in arrays.items()}
        ngram = PieceNGram(sizes.pieces, arrays) if arrays else None
    weights: dict[str, Tensor] = unpack_rows(state, "directory")
    return build_with_weights(lambda: CtcHead(sizes), weights, "directory", folder), pieces, tokens, ngram


@lru_cache(maxsize=4)
def _merges(pairs: tuple[bytes, str], merged: tuple[bytes, str], alphabet: tuple[bytes, str]) -> Merges:
    """Make the BPE from stored tables, once for all heads of a model.

    Each table is given as its bytes and the dtype of its numbers.
    """
    left_right, tokens = (np.frombuffer(*table).tolist() if table[0] else [] for table in (pairs, merged))
    left_right = list(zip(left_right[::2], left_right[1::2], strict=True))
    if len(tokens) == 1:  # only the first number is stored if they are consecutive
        tokens = range(tokens[0], tokens[0] + len(left_right))
    rows = [(left, right, token) for (left, right), token in zip(left_right, tokens, strict=True)]
    return Merges(rows, np.frombuffer(*alphabet).tolist())


def _tables(pieces: TokenPieces) -> dict[str, Tensor]:
    """Return the draft vocabulary and the BPE merges as tensors of small integers, by name."""
    merges = pieces.merges
    pairs, merged = [row[:2] for row in merges.rows], [row[2] for row in merges.rows]
    if merged and merged == list(range(merged[0], merged[0] + len(merged))):
        merged = merged[:1]
    largest = max([*pieces.token_ids, *(token for row in merges.rows for token in row)], default=0)
    small = torch.uint16 if largest < 2**16 else torch.int32
    unsigned = {"pieces": pieces.token_ids, "merges": pairs, "merged": merged}
    tables = {name: torch.tensor(table, dtype=torch.int32).to(small) for name, table in unsigned.items()}
    return {**tables, "alphabet": torch.tensor(merges.alphabet, dtype=torch.int32)}


def _card(head: CtcHead, tokens: CtcTokenIds, trained: str) -> str:
    base, count = tokens.base or "the model that it was trained for", sum(w.numel() for w in head.parameters())
    text = (
        f"# A CTC head that drafts for {base}\n\n{count:,} parameters in 8 bits, {head.config.pieces} pieces, over the "
        f"encoder's states ({head.config.d_states} channels). It proposes tokens and the model verifies them, so "
        "the text is the model's own.\n"
    )
    if trained:
        text += f"\n{trained}\n"
    if tokens.base:
        text += (
            "\nPass its folder as `drafter`:\n\n```python\nimport mmdec\n\n"
            f'out = mmdec.transcribe("recording.wav", model={json.dumps(tokens.base)}, drafter="FOLDER")\n'
            "print(out.text, out.tokens_per_round)\n```\n"
        )
    return text
