"""The vocoder: exact analysis and synthesis, independence of the batch, its oscillator; published HiFi-GAN weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    FastSpeech2ConformerHifiGan,
    FastSpeech2ConformerHifiGanConfig,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)
from typer.testing import CliRunner

from mmdec.cli import app
from mmdec.daspeech.hifigan import convert_hifigan, load_hifigan
from mmdec.daspeech.vocoder import (
    BINS,
    ESPNET,
    OUR_MELS,
    SPEECHT5,
    HifiGanVocoder,
    MelKind,
    Vocoder,
    VocoderConfig,
    adapt_mel,
    pulse_train,
    standard_noise,
)
from mmdec.errors import InputError
from mmdec.io.audio import log_mel, pitch

TINY = VocoderConfig(channels=16, hidden=24, blocks=2)
SMALL_GAN = {"upsample_initial_channel": 16, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}


def tiny() -> Vocoder:
    torch.manual_seed(0)
    return Vocoder(TINY).eval()


def test_the_vocoder_has_under_a_million_parameters():
    assert sum(parameter.numel() for parameter in Vocoder().parameters()) <= 0.95e6


def test_analysis_and_synthesis_are_exact():
    model = tiny()
    model.head.weight.data.zero_()
    model.head.bias.data[2 * BINS :] = -100.0  # pulses pass as they are, no noise
    contour = torch.linspace(120, 240, 40)[None]
    with torch.inference_mode():
        samples, _ = model.synthesise(torch.randn(1, 40, 80), pitch=contour)
    torch.testing.assert_close(samples, pulse_train(contour), atol=1e-4, rtol=0)


def test_a_batch_equals_its_rows_alone():
    model = tiny()
    lengths = torch.tensor([20, 9, 1])
    mel = torch.randn(3, 20, 80)
    with torch.inference_mode():
        both = model(mel, lengths)
        for row, length in enumerate(lengths.tolist()):
            single = model(mel[row : row + 1, :length])
            assert single.shape == (1, length * 256)
            difference = (both[row, : length * 256] - single[0]).abs().max()
            assert difference < 1e-3 * single.abs().max()  # rounding of the pitch turns the phase a little
            assert not both[row, length * 256 :].any()


def test_the_same_mel_gives_the_same_sound():
    model, mel = tiny(), torch.randn(1, 30, 80)
    with torch.inference_mode():
        first = model(mel)
        torch.randn(5)
        assert torch.equal(first, model(mel))
    assert torch.equal(standard_noise(70_000)[:100], standard_noise(100))


def test_pulses_have_the_pitch_asked_for_and_unit_power():
    samples = pulse_train(torch.full((1, 100), 170.0))[0]
    assert samples.square().mean().item() == pytest.approx(1.0, abs=0.02)
    measured = pitch(0.05 * samples)[5:-5]
    assert measured.median().item() == pytest.approx(170.0, abs=1.0)


def test_gradients_reach_every_parameter():
    model = tiny().train()
    samples, predicted = model.synthesise(torch.randn(2, 8, 80), pitch=torch.full((2, 8), 150.0))
    (samples.square().mean() + predicted.log().mean()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_loud_nonsense_stays_finite():
    with torch.inference_mode():
        assert torch.isfinite(tiny()(torch.full((1, 10, 80), 100.0))).all()


@pytest.mark.parametrize(
    ("network", "config", "kind"),
    [
        (SpeechT5HifiGan, SpeechT5HifiGanConfig(**SMALL_GAN), SPEECHT5),
        (FastSpeech2ConformerHifiGan, FastSpeech2ConformerHifiGanConfig(**SMALL_GAN), ESPNET),
    ],
)
def test_transformers_hifigan_loads(network, config, kind: MelKind, tmp_path: Path):
    torch.manual_seed(0)
    stored = network(config).eval()
    stored.save_pretrained(tmp_path)
    vocoder = load_hifigan(tmp_path)
    assert vocoder.expects == kind
    mel = torch.randn(2, 12, 80) - 5
    samples = vocoder(mel, torch.tensor([12, 7]))
    assert samples.shape == (2, 12 * 256)
    assert torch.isfinite(samples).all()
    assert not samples[1, 7 * 256 :].any()
    raw = HifiGanVocoder(vocoder.generator, OUR_MELS)
    if network is SpeechT5HifiGan:
        with torch.no_grad():
            torch.testing.assert_close(raw(mel), stored(mel).view(2, -1))


def test_the_authors_generator_file_loads(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {
        "upsample_rates": [8, 8, 2, 2],
        "upsample_kernel_sizes": [16, 16, 4, 4],
        "upsample_initial_channel": 16,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
    }
    reference = FastSpeech2ConformerHifiGan(FastSpeech2ConformerHifiGanConfig(normalize_before=False, **sizes)).eval()
    state = {}
    for name, value in reference.state_dict().items():
        if name in ("mean", "scale"):
            continue
        name = name.replace("upsampler.", "ups.")
        if name.endswith(".weight"):  # as stored: direction of any length, and gain
            state[name + "_g"] = value.flatten(1).norm(dim=1).view(-1, 1, 1)
            state[name + "_v"] = 3.0 * value
        else:
            state[name] = value
    torch.save({"generator": state}, tmp_path / "generator")
    described = {"resblock": "1", "num_mels": 80, "sampling_rate": 22050, "hop_size": 256, "fmin": 0, "fmax": 8000}
    (tmp_path / "config.json").write_text(json.dumps(described | sizes), encoding="utf-8")
    with pytest.raises(InputError, match="pickles are not read"):
        load_hifigan(tmp_path / "generator")
    done = CliRunner().invoke(app, ["convert", "hifigan", str(tmp_path / "generator"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".safetensors"}
    vocoder = load_hifigan(tmp_path / "out")
    assert vocoder.expects == MelKind(sample_rate=22050, f_min=0.0)
    mel = torch.randn(1, 16, 80)
    with torch.no_grad():
        torch.testing.assert_close(vocoder.generator(mel), reference(mel), atol=1e-5, rtol=1e-4)
    assert vocoder(mel).shape == (1, 16 * 256)


def test_our_mels_become_the_mels_a_vocoder_expects():
    seconds = torch.arange(16000) / 16000
    samples = sum(torch.sin(2 * torch.pi * f * seconds) for f in (220, 900, 2500)) * 0.1
    assert isinstance(samples, torch.Tensor)
    ours = log_mel(samples)[None]
    back = adapt_mel(ours, MelKind(f_min=20.001))  # the same filters, by the long way round
    loud = ours > ours.max() - 3
    torch.testing.assert_close(back[loud], ours[loud], atol=0.2, rtol=0)
    theirs = adapt_mel(ours, MelKind(sample_rate=22050, f_min=0.0))
    assert theirs.shape == (1, round(63 * 256 / 16000 * 22050 / 256), 80)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sampling_rate": 24_000}, "must speak at 16000 Hz"),
        ({"model_in_dim": 64}, "must take 80 mel bands, but takes 64"),
        ({"upsample_rates": [4, 4, 4, 5]}, "must give 256 samples a frame, as its mels have, but gives 320"),
    ],
)
def test_mels_that_ours_cannot_become_are_refused(change: dict, reason: str, tmp_path: Path):
    SpeechT5HifiGanConfig(**(SMALL_GAN | change)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=reason):
        load_hifigan(tmp_path)


def test_weights_that_are_missing_or_cut_short_are_named(tmp_path: Path):
    SpeechT5HifiGanConfig(**SMALL_GAN).save_pretrained(tmp_path)
    for content in (None, b"x" * 40):
        if content:
            (tmp_path / "model.safetensors").write_bytes(content)
        reason = "is damaged" if content else r"lacks 'model\.safetensors'"
        with pytest.raises(InputError, match=f"`vocoder` must hold .*{reason}"):
            load_hifigan(tmp_path)


def test_other_weights_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"config\.json"):
        load_hifigan(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(InputError, match="'bert'"):
        load_hifigan(tmp_path)
    (tmp_path / "config.json").write_text('{"resblock": "2"}', encoding="utf-8")
    (tmp_path / "generator").write_bytes(b"")
    with pytest.raises(InputError, match="type 1"):
        convert_hifigan(tmp_path / "generator", tmp_path / "out")
    (tmp_path / "config.json").write_text('{"upsample_rates": [8, 8, 2, 2]}', encoding="utf-8")
    with pytest.raises(InputError, match="whole HiFi-GAN generator"):
        convert_hifigan(tmp_path / "generator", tmp_path / "out")
    assert not (tmp_path / "out").exists()
