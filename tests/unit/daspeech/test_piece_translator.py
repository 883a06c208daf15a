"""Tests the translator with a Whisper's encoder up to its decoders' input: the order of its parts, and that rows do not
depend on their batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmdec.daspeech.piece_translator import PieceTranslator, PieceTranslatorConfig
from mmdec.drafters.ctc.network import best_pieces, collapse
from mmdec.errors import InputError
from mmdec.whisper.unpadded_encoder import STATES_TAIL, read_states
from tests.conftest import buzz
from tests.support.tiny_piece_translator import network, sizes


def sounds() -> list[Tensor]:
    return [torch.from_numpy(buzz(seconds, seed)) for seed, seconds in enumerate((1.4, 0.6, 2.1))]


@torch.no_grad()
def test_the_parts_run_in_their_order() -> None:
    model = network(0)
    for sound in sounds():
        states, counts = read_states(model.encoder, [sound], tail=STATES_TAIL)
        heard = best_pieces(*model.head(states, counts), best=4)
        read = model.reader(heard.pieces, heard.weights, heard.lengths)
        source = model.source(*model.features([sound]))
        assert torch.equal(source.states, read)
        assert source.lengths.tolist() == source.sizes.tolist() == heard.lengths.tolist()
        assert source.limits == [2 * int(heard.lengths) + 10]
        assert int(heard.lengths) > 1
        assert len(model.lattice(source.states, source.lengths, source.sizes).hidden[0]) == max(
            24, 4 * int(heard.lengths)
        )


@torch.no_grad()
@pytest.mark.parametrize("d_states", [0, 32])
def test_a_row_alone_equals_a_row_in_a_batch(d_states: int) -> None:
    model = network(3, d_states=d_states)
    together = model.source(*model.features(sounds()))
    for row, sound in enumerate(sounds()):
        single = model.source(*model.features([sound]))
        count = int(single.lengths)
        assert count == int(together.lengths[row])
        assert together.limits[row] == single.limits[0]
        torch.testing.assert_close(together.states[row, :count], single.states[0, :count], rtol=1e-3, atol=1e-3)
        picked = together.select([row])
        assert picked.transcripts is not None
        assert single.transcripts is not None
        assert torch.equal(picked.transcripts.pieces[0, :count, 0], single.transcripts.pieces[0, :count, 0])
        frames = int(single.transcripts.counts)
        assert int(picked.transcripts.counts) == frames
        torch.testing.assert_close(
            picked.transcripts.logprobs[0, :frames], single.transcripts.logprobs[0], rtol=1e-3, atol=1e-3
        )
        assert not picked.transcripts.logprobs[0, frames:].any()


@torch.no_grad()
def test_the_states_at_each_piece_are_added_where_the_reader_takes_them() -> None:
    model = network(3, d_states=32)
    features = model.features(sounds()[:1])
    heard, states = model.recognise(*features)
    expected = model.reader(heard.pieces, heard.weights, heard.lengths, states[:, 2 * heard.frames[0]])
    assert torch.equal(model.source(*features).states, expected)
    assert not torch.equal(expected, model.reader(heard.pieces, heard.weights, heard.lengths))


@torch.no_grad()
def test_logprobs_are_those_of_the_best_path() -> None:
    logits, lengths = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([9, 4])
    heard = best_pieces(logits, lengths, 2)
    expected = logits.log_softmax(-1).amax(-1)
    assert torch.equal(heard.logprobs[0], expected[0])
    assert torch.equal(heard.logprobs[1, :4], expected[1, :4])
    assert heard.counts.tolist() == [9, 4]
    paths = collapse(logits.argmax(-1), lengths)
    assert heard.lengths.tolist() == [len(path) for path in paths]


@torch.no_grad()
def test_a_silent_row_has_no_length_and_leaves_the_others_alone() -> None:
    model = network(0)
    both = best_pieces(torch.stack([torch.eye(6)[[0, 0, 0]], torch.eye(6)[[0, 3, 0]]]) * 9, torch.tensor([3, 3]), 2)
    assert both.lengths.tolist() == [0, 1]
    silent = PieceTranslator(sizes(model.sizes.head.pieces, model.sizes.reader.units))
    silent.head.output.weight.zero_()
    silent.head.output.bias.zero_()
    silent.head.output.bias[0] = 9.0
    source = silent.eval().source(*silent.features(sounds()[:1]))
    assert source.lengths.tolist() == [0]
    assert source.states.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": {"d_states": 16}}, "`d_states` must fit the network before it, 32, but is 16"),
        ({"reader": {"pieces": 12}}, "`pieces` must fit .*, 40, but is 12"),
        ({"reader": {"d_states": 16}}, "`reader.d_states` must fit .*, 32, but is 16"),
        ({"best": 0}, "`best` must fit .*, 1, but is 0"),
        ({"best": 41}, "`best` must fit .*, 40, but is 41"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    whole = sizes(40, 50)
    changed = {
        name: replace(getattr(whole, name), **value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    with pytest.raises(InputError, match=message):
        replace(whole, **changed)
    assert PieceTranslatorConfig.from_dict(whole.to_dict()) == whole
