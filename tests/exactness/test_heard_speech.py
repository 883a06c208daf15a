"""Tests speech translation with pieces: verified decoding equals autoregressive decoding for any draft of the graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmdec.daspeech.evidence import autoregressive_evidence, score_texts
from mmdec.daspeech.options import STRATEGIES
from mmdec.daspeech.translator import RERANKED_TEXTS, SpeechTranslator
from mmdec.daspeech.units import BOS, EOS
from tests.conftest import buzz
from tests.support.grid import slow_but
from tests.support.tiny_piece_translator import parts


def translator(seed: int, folder: Path) -> SpeechTranslator:
    """Random networks; in half of them the text ends before its limit."""
    whole = parts(seed, pronunciation=folder / "pronunciation.tsv")
    with torch.no_grad():
        whole.model.autoregressive.embed_tokens.weight[EOS] *= 1 + 5 * (seed % 2)
    return SpeechTranslator(whole)


@pytest.mark.parametrize("seed", slow_but(range(12), (3, 10)))  # odd: the text ends before its limit
def test_verified_is_autoregressive(seed: int, tmp_path: Path) -> None:
    model = translator(seed, tmp_path)
    sounds = [torch.from_numpy(buzz(0.5 + 0.4 * turn, 10 * seed + turn)) for turn in range(5)]
    own, checked = (model.translate(sounds, strategy) for strategy in ("autoregressive", "verified"))
    assert [row.units for row in checked] == [row.units for row in own]
    assert [row.text for row in checked] == [row.text for row in own]
    for own_speech, checked_speech in zip(own, checked, strict=True):
        assert torch.equal(own_speech.samples, checked_speech.samples)
        assert checked_speech.passes <= own_speech.passes


def test_the_cases_differ_and_some_end_before_the_limit(tmp_path: Path) -> None:
    kinds, ended = set(), 0
    for seed in range(12):
        model = translator(seed, tmp_path)
        (row,) = model.translate([torch.from_numpy(buzz(0.9, seed))], "autoregressive")
        source = model.model.source(*model.model.features([torch.from_numpy(buzz(0.9, seed))]))
        kinds.add(len(set(row.units)))
        ended += row.passes <= source.limits[0]
    assert len(kinds) > 3
    assert ended >= 2


@pytest.mark.parametrize("seed", slow_but(range(6), (0, 1)))
def test_reranked_is_the_graphs_text_that_both_decoders_find_likeliest(seed: int, tmp_path: Path) -> None:
    model = translator(seed, tmp_path)
    sound = torch.from_numpy(buzz(1.1, seed))
    with torch.inference_mode():
        source = model.model.source(*model.model.features([sound]))
        paths = model.model.lattice(source.states, source.lengths, source.sizes).beam(
            None, model.decoding.collapse, RERANKED_TEXTS
        )
        texts = [[token for token in row.tolist() if token > EOS + 1] for row in paths.tokens]
        beams, worth = paths.beams, []
        assert beams is not None
        for text, score in zip(texts, beams.tolist(), strict=True):  # each alone, with the cached steps that decode
            decoder = model.model.autoregressive
            cache = decoder.start(source.states, source.lengths, len(text) + 1)
            steps = zip([BOS, *text], [*text, EOS], strict=True)
            logprobs = [decoder.step(torch.tensor([a]), cache).log_softmax(-1)[0, b] for a, b in steps]
            worth.append(float(score) + float(sum(logprobs)))
    read: list[int] = []  # rows of each pass of the decoder
    model.model.autoregressive.register_forward_hook(lambda _, given, __: read.append(len(given[0])))
    (row,) = model.translate([sound], "reranked")
    assert read == [len(texts)]  # its confidence needs no pass of its own
    with torch.inference_mode():
        (single,) = score_texts(model.model.autoregressive, [texts[worth.index(max(worth))]], source)
    evidence = autoregressive_evidence(single)
    assert {name: row.evidence[name] for name in evidence} == pytest.approx(evidence, abs=1e-4)
    assert row.units == [model.units[token] for token in texts[worth.index(max(worth))]]
    assert row.passes == 2
    assert max(worth) > worth[0] or seed not in (0, 3)  # not the search's own first in some


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", slow_but([1, 4], [1]))
def test_a_padded_batch_has_the_units_of_its_rows_alone(strategy: str, seed: int, tmp_path: Path) -> None:
    model = translator(seed, tmp_path)
    sounds = [torch.from_numpy(buzz(seconds, seed)) for seconds in (1.3, 0.5, 2.2)]
    together = model.translate_batch(sounds, strategy)
    for row, sound in zip(together, sounds, strict=True):
        (single,) = model.translate([sound], strategy)
        assert row.units == single.units
        assert row.text == single.text
        assert row.confidence == pytest.approx(single.confidence, abs=1e-3)
        assert row.evidence == pytest.approx(single.evidence, abs=1e-2)


def test_a_silent_row_does_not_change_its_neighbours(tmp_path: Path) -> None:
    model = translator(1, tmp_path)
    with torch.no_grad():  # hears nothing in what is short
        sounds = [torch.from_numpy(buzz(seconds, 1)) for seconds in (1.3, 2.2)]
        whole = model.model.recognise
        deaf = torch.zeros(3, dtype=torch.bool)
        deaf[1] = True

        def recognise(*features: torch.Tensor):
            heard, states = whole(*features)
            lost = deaf if len(heard.lengths) == 3 else torch.zeros(len(heard.lengths), dtype=torch.bool)
            return replace(heard, lengths=heard.lengths.masked_fill(lost, 0)), states

        model.model.recognise = recognise  # type: ignore[method-assign]
        for strategy in ("lookahead", "verified"):
            result = model.translate_batch([sounds[0], sounds[1], sounds[1]], strategy)
            assert (result[1].text, result[1].units, result[1].passes, len(result[1].samples)) == ("", [], 0, 0)
            assert result[1].confidence == 0.0
            for row, sound in ((0, sounds[0]), (2, sounds[1])):
                assert result[row].units == model.translate([sound], strategy)[0].units
                assert result[row].timings["encoder"] == result[1].timings["encoder"]


def test_the_decoders_text_carries_the_graphs_confidence(tmp_path: Path) -> None:
    model = translator(2, tmp_path)
    sound = torch.from_numpy(buzz(1.1, 2))
    verified, graph, single = (
        model.translate([sound], strategy)[0] for strategy in ("verified", "lookahead", "autoregressive")
    )
    assert verified.evidence["graph"] == graph.evidence["graph"]
    assert single.evidence["graph"] == graph.evidence["graph"]
    assert single.units == verified.units
