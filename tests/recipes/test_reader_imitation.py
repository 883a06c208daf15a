"""Tests text with imitated errors of a CTC head: the head's edits are counted, and drawn again for each piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdec.daspeech.checkpoint import load_piece_translator
from mmdec.daspeech.training.reader.confusions import MIN_OUTCOMES, START, Confusions, collect_confusions
from mmdec.daspeech.training.reader.data import Pairs
from mmdec.drafters.ctc.network import CtcTranscripts
from mmdec.errors import InputError
from mmdec.io.audio import load_audio
from recipes.reader.imitation import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def ctc_transcripts(*places: int) -> CtcTranscripts:
    """Return each place's first piece, another one beside it."""
    pieces = torch.tensor([[[place, place + 100] for place in places]]).view(1, -1, 2)
    weights = torch.tensor([0.75, 0.25]).expand(1, len(places), 2)
    counts, frames = torch.tensor([len(places)]), torch.zeros(1, len(places))
    return CtcTranscripts(pieces, weights, counts, frames, frames, counts)


def outcomes(result: Confusions) -> list[tuple[int, list[int]]]:
    spans: list[Tensor] = [result.pieces[a:b, 0] for a, b in zip(result.starts[:-1], result.starts[1:], strict=True)]
    return list(zip(result.true_pieces.tolist(), [span.tolist() for span in spans], strict=True))


@pytest.mark.parametrize(
    ("text", "places", "expected"),
    [
        ([5, 6, 7], [5, 6, 7], [(START, []), (5, [5]), (6, [6]), (7, [7])]),
        ([5, 6, 7], [5, 7], [(START, []), (5, [5]), (6, []), (7, [7])]),
        ([5, 6], [9, 5, 8, 6], [(START, [9]), (5, [5, 8]), (6, [6])]),
        ([5, 6, 7], [5, 8, 7, 9], [(START, []), (5, [5]), (6, [8]), (7, [7, 9])]),
    ],
)
def test_each_piece_has_its_recognised_pieces(
    text: list[int], places: list[int], expected: list[tuple[int, list[int]]]
) -> None:
    assert outcomes(collect_confusions([(text, ctc_transcripts(*places))])) == expected


def test_a_head_without_output_is_refused() -> None:
    with pytest.raises(InputError, match="`head` must recognise pieces"):
        collect_confusions([([5, 6], ctc_transcripts())])


def test_imitations_have_the_confusions_of_each_piece_at_their_rates(tmp_path: Path) -> None:
    pairs = (
        [([5, 6], ctc_transcripts(5, 6))] * 30
        + [([5, 6], ctc_transcripts(5, 8))] * 10
        + [([5, 6], ctc_transcripts(5))] * 10
    )
    collect_confusions(pairs).save(tmp_path / "confusions.safetensors")
    result = Confusions.read(tmp_path / "confusions.safetensors")
    draw = np.random.default_rng(0)
    texts = [result.imitate([5, 6], draw)[0][:, 0].tolist() for _ in range(500)]
    counts = [texts.count(text) / 500 for text in ([5, 6], [5, 8], [5])]
    assert sum(counts) == pytest.approx(1)
    assert counts == pytest.approx([0.6, 0.2, 0.2], abs=0.06)
    pieces, weights = result.imitate([5], draw)
    assert pieces.tolist() == [[5, 105]]
    assert weights.tolist() == [[0.75, 0.25]]


def test_a_rare_piece_borrows_the_confusions_of_another() -> None:
    result = collect_confusions([([5], ctc_transcripts(5))] * MIN_OUTCOMES + [([7], ctc_transcripts(8))])
    for _ in range(5):
        pieces, _ = result.imitate([7, 9], np.random.default_rng(1))
        assert pieces.tolist() == [[7, 105], [9, 105]]


def test_a_text_imitated_as_silence_keeps_its_first_piece() -> None:
    result = collect_confusions([([5], ctc_transcripts(5))] + [([6], ctc_transcripts())] * 9)
    pieces, weights = result.imitate([6], np.random.default_rng(0))
    assert pieces.tolist() == [[6, 0]]
    assert weights.tolist() == [[1, 0]]


def test_batches_are_imitated_alike_each_time() -> None:
    result = collect_confusions([([5, 6], ctc_transcripts(5, 6))] * 5 + [([5, 6], ctc_transcripts(9, 5, 8, 6))] * 5)
    dataset = Pairs([[5, 6], [6]], [[[4]], [[4]]], [[(0, 0), (1, 0)]], result, [3])
    batch, again = dataset[0], dataset[0]
    assert batch.pieces.shape[2] == 2
    assert torch.equal(batch.pieces, again.pieces)
    assert torch.equal(batch.weights, again.weights)
    sums = batch.weights.sum(-1)
    for row, count in enumerate(batch.lengths.tolist()):
        assert sums[row, :count] == pytest.approx(torch.ones(count))
        assert not sums[row, count:].any()


def test_confusions_come_from_a_whole_translator(tmp_path: Path) -> None:
    """The stored texts are those that the shipped translator hears, by its own encoder and n-gram."""
    recording = next((ROOT / "data" / "samples").glob("*.wav"))
    (tmp_path / "a.wav").write_bytes(recording.read_bytes())
    rows = (("id", "path", "split", "speaker", "text"), ("a", "a.wav", "train", "b", "bonjour à tous"))
    (tmp_path / "manifest.tsv").write_text("\n".join("\t".join(row) for row in rows), encoding="utf-8")
    folder = ROOT / "models" / "daspeech-everyday"
    out = tmp_path / "confusions.safetensors"
    options = {"head": folder, "pieces": folder / "pieces.json", "corpus": tmp_path / "manifest.tsv", "out": out}
    main(["--skip=0", *(f"--{name}={value}" for name, value in options.items())])
    model = load_piece_translator(folder).model.eval()
    with torch.inference_mode():
        row = model.recognise(*model.features([load_audio(recording)]))[0]
    assert Confusions.read(out).pieces.tolist() == row.pieces[0, : int(row.lengths[0])].tolist()


def test_a_checkpoint_needs_its_encoder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`encoder` must be given"):
        main([*(f"--{name}={tmp_path / name}" for name in ("head", "pieces", "corpus", "out")), "--skip=0"])
