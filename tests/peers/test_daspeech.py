"""Compares the authors' DASpeech with the converted one: names, encoder, graph, links, voice and decoding.

DASPEECH names a clone of github.com/ictnlp/DASpeech (65c3684), whose folder holds the fairseq that it was made with;
`make authors DASPEECH=folder` installs what that imports and runs this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmdec.daspeech.dag_decoder import decode_lattice
from mmdec.daspeech.fairseq import read_published
from mmdec.daspeech.model import DASpeech
from tests.support.published_daspeech import PAPER, PHONES, SMALL, arguments, random_weights, shapes

CLONE = os.environ.get("DASPEECH", "")
UNITS = 4 + len(PHONES)
pytestmark = pytest.mark.skipif(not CLONE, reason="`make authors DASPEECH=clone` runs the authors' code")


@contextmanager
def older_python() -> Iterator[None]:
    """fairseq 0.12.2 has dataclasses as default values, which Python 3.11 takes only if they have a hash, and names of
    numpy 1."""
    real = dataclasses.dataclass

    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        def make_dataclass(one: Any) -> Any:
            old = one.__module__.startswith("fairseq") and "__hash__" not in one.__dict__
            return real(one, **({"unsafe_hash": True, **options} if old and not options.get("frozen") else options))

        return make_dataclass if cls is None else make_dataclass(cls)

    for kind in (float, int, bool, object):
        if kind.__name__ not in np.__dict__:
            setattr(np, kind.__name__, kind)
    dataclasses.dataclass = dataclass
    try:
        yield
    finally:
        dataclasses.dataclass = real


def authors(sizes: dict[str, Any]) -> Any:
    """Return the authors' network of these sizes, evaluating."""
    sys.path[:0] = [str(Path(CLONE) / "fairseq"), CLONE]
    with older_python():
        from DASpeech.models import s2s_conformer_dag_fastspeech2 as theirs  # type: ignore[import-not-found]
        from fairseq.data import Dictionary  # type: ignore[import-not-found]
    theirs.torch_seed = lambda seed: nullcontext()  # it asks for a GPU's generator
    symbols = Dictionary()
    for phone in PHONES:
        symbols.add_symbol(phone)
    rest = {"fp16": False, "dropout": 0.1, "var_pred_dropout": 0.5, "output_frame_dim": 80, "add_postnet": False}
    rest |= {"encoder_freezing_updates": 0, "conv_out_channels": sizes["encoder_embed_dim"], "decode_beta": 1}
    given = argparse.Namespace(**arguments(sizes), **rest)
    kind = theirs.S2SConformerDAGFastSpeech2Model
    return kind.build_model(given, SimpleNamespace(target_dictionary=symbols)).eval()


@pytest.fixture(scope="module")
def both_models() -> tuple[Any, DASpeech]:
    theirs, weights = authors(SMALL), random_weights(arguments(SMALL), UNITS)
    theirs.load_state_dict(weights)  # strict: every name and shape
    result = read_published(arguments(SMALL), weights)
    ours = DASpeech(result.config, UNITS)
    missing = ours.load_state_dict(result.state, strict=False)
    assert all("mel_" in name or "stats" in name for name in missing.missing_keys), missing
    return theirs, ours.eval()


def test_names_and_shapes_equal_the_authors() -> None:
    with torch.device("meta"):
        state = authors(PAPER).state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == shapes(arguments(PAPER), UNITS)


# Their convolutions read the padding of a batch, so that a short row depends on its neighbours; ours do not. Our
# batch is compared with their rows, each alone.
@pytest.mark.parametrize("frames", [[64], [120, 77], [48, 200, 33]])
@torch.no_grad()
def test_networks_equal_the_authors(both_models: tuple[Any, DASpeech], frames: list[int]) -> None:
    theirs, ours = both_models
    lengths = torch.tensor(frames)
    features = torch.randn(len(frames), max(frames), 80, generator=torch.Generator().manual_seed(frames[0]))
    features *= (torch.arange(max(frames)) < lengths[:, None])[..., None]
    states, sizes = ours.encode(features, lengths)
    lattice = ours.lattice(states, sizes, lengths)
    for row, size in enumerate(frames):
        single, length = features[row : row + 1, :size], lengths[row : row + 1]
        encoded = theirs.encoder(single, src_lengths=length)
        tokens = theirs.initialize_output_tokens(encoded, single, length).output_tokens
        logits, banded, hidden = theirs.extract_features(tokens, encoded, 0, require_links=True)
        links, count = theirs.restore_valid_links(banded), tokens.shape[1]
        assert count == int(lattice.lengths[row])
        expected = encoded["encoder_out"][0][:, 0]
        torch.testing.assert_close(states[row, : len(expected)], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(lattice.hidden[row, :count], hidden[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(lattice.emissions[row, :count], logits[0].log_softmax(-1), rtol=0, atol=3e-5)
        result = lattice.links[row, : count - 1, :count]
        torch.testing.assert_close(result, links[0, :-1], rtol=0, atol=3e-5)


@torch.no_grad()
def test_vocoders_equal_the_authors(both_models: tuple[Any, DASpeech]) -> None:
    theirs, ours = both_models
    counts = torch.tensor([23, 17])
    hidden = torch.randn(2, 23, SMALL["decoder_embed_dim"], generator=torch.Generator().manual_seed(3))
    output = ours.tts(ours.acoustic_input(hidden), counts)
    for row, count in enumerate(counts.tolist()):
        spoken = theirs.tts(theirs.adaptor(hidden[row : row + 1, :count]), torch.zeros(1, count, dtype=torch.bool))
        size = int(output.mel_lengths[row])
        assert size == int(spoken[2]) > 10
        torch.testing.assert_close(output.mel[row, :size], spoken[0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 3, 4])  # they fail where no phone is written
@torch.no_grad()
def test_lookahead_equals_the_authors(both_models: tuple[Any, DASpeech], seed: int) -> None:
    """They write the first and last vertices' likeliest units, we write <s> and </s>; trained ones are the same."""
    theirs, ours = both_models
    features, lengths = torch.randn(1, 160, 80, generator=torch.Generator().manual_seed(seed)), torch.tensor([160])
    encoded = theirs.encoder(features, src_lengths=lengths)
    begun = theirs.initialize_output_tokens(encoded, features, lengths)
    written = theirs.forward_decoder(begun, encoded).output_tokens[0].tolist()
    lattice = ours.lattice(*ours.encode(features, lengths), lengths)
    path = decode_lattice(lattice.emissions, lattice.links, lattice.lengths, "lookahead")
    ends = lattice.emissions[0, [0, -1]].argmax(-1).tolist()
    inner = [token for token in path.tokens[0].tolist() if token >= 0][1:-1]
    collapsed = [unit for unit, before in zip([*ends[:1], *inner, ends[1]], [-1, *ends[:1], *inner], strict=True)
                 if unit != before and unit != 1]  # fmt: skip
    assert collapsed == written
