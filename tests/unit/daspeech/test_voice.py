"""Tests the voice for any text: it equals the acoustic model of training, for any content of the padding."""

from __future__ import annotations

import torch

from mmdec.daspeech.acoustic import FastSpeech2Config
from mmdec.daspeech.piece_translator import EOS, PhoneVoice
from mmdec.training.corpora.cvss import SPECIALS

TINY = FastSpeech2Config(d_model=16, encoder_layers=1, decoder_layers=1, heads=2, ffn=24, kernels=(3, 3), predictor=8)


def tiny() -> PhoneVoice:
    torch.manual_seed(0)
    voice = PhoneVoice(TINY, 12).eval()
    with torch.no_grad():
        voice.tts.duration.out.bias.fill_(1.2)  # untrained, it would predict no frames at all
    return voice


def test_the_voice_equals_the_acoustic_model() -> None:
    voice = tiny()
    phones = torch.tensor([[4, 5, 6]])
    with torch.inference_mode():
        mel, frames = voice(phones, torch.tensor([3]))
        units = torch.tensor([[4, 5, 6, SPECIALS.index("</s>")]])
        expected = voice.tts(voice.tts.embed(units), torch.tensor([4]))
    assert SPECIALS.index("</s>") == EOS
    assert mel.shape == (1, int(frames), 80)
    assert torch.equal(mel, expected.mel)


def test_a_batch_equals_its_rows_alone() -> None:
    voice, lengths = tiny(), torch.tensor([5, 2, 0])
    phones = torch.randint(4, 12, (3, 5))
    with torch.inference_mode():
        mel, frames = voice(phones, lengths)
        for row, length in enumerate(lengths.tolist()):
            single, count = voice(phones[row : row + 1, :length], lengths[row : row + 1])
            assert int(count) == int(frames[row])
            torch.testing.assert_close(mel[row, : int(count)], single[0, : int(count)], rtol=1e-4, atol=1e-5)
            assert not mel[row, int(count) :].any()


def test_rows_are_cut_at_the_most_frames() -> None:
    voice = tiny()
    with torch.inference_mode():
        mel, frames = voice(torch.full((1, 50), 7), torch.tensor([50]), max_frames=20)
    assert mel.shape[1] == int(frames) == 20
