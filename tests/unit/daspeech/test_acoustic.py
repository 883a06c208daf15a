"""FastSpeech 2: sizes, repetition of phones, independence of padding, the loss, and targets from alignments."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdec.daspeech.acoustic import AcousticBatch, FastSpeech2, FastSpeech2Config, acoustic_loss, regulate_lengths
from mmdec.daspeech.training.acoustic import acoustic_targets, interpolate_pitch
from mmdec.errors import InputError
from mmdec.training.corpora.cvss import parse_alignment

TINY = FastSpeech2Config(d_model=16, encoder_layers=1, decoder_layers=1, heads=2, ffn=24, kernels=(3, 3), predictor=8)


def tiny(seed: int = 0) -> FastSpeech2:
    torch.manual_seed(seed)
    return FastSpeech2(TINY, 12).eval()


def parameters(config: FastSpeech2Config) -> int:
    return sum(parameter.numel() for parameter in FastSpeech2(config, 45).parameters())


def test_sizes_equal_the_paper_and_the_small_one_is_small():
    assert parameters(FastSpeech2Config()) == pytest.approx(41.2e6, rel=0.005)
    assert parameters(FastSpeech2Config.small()) <= 1.2e6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(1, 12))
def test_regulate_repeats_each_phone_for_its_frames(rows: list[list[int]], limit: int):
    x = torch.randn(len(rows), 4, 3)
    frames, lengths = regulate_lengths(x, torch.tensor(rows), limit)
    for row, (durations, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        naive = [x[row, place] for place, count in enumerate(durations) for _ in range(count)][:limit]
        assert length == len(naive)
        if naive:
            assert torch.equal(frames[row, :length], torch.stack(naive))


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("kernels", [(3, 3), (5, 1)])
def test_a_batch_equals_its_rows_alone(forced: bool, kernels: tuple[int, int]):
    torch.manual_seed(1)
    model = FastSpeech2(dataclasses.replace(TINY, kernels=kernels), 12).eval()
    with torch.no_grad():
        model.duration.out.bias.fill_(1.2)  # untrained, it would predict no frames at all
    lengths = torch.tensor([7, 3, 5])
    units = torch.randint(0, 12, (3, 7))
    given_durations = torch.randint(1, 5, (3, 7))
    inputs = model.embed(units)
    inputs[1, 3:] = 1e3  # what padding holds does not matter
    with torch.inference_mode():
        both = model(inputs, lengths, given_durations if forced else None)
        for row, length in enumerate(lengths.tolist()):
            part = given_durations[row : row + 1, :length] if forced else None
            single = model(inputs[row : row + 1, :length], torch.tensor([length]), part)
            frames = int(single.mel_lengths[0])
            assert frames > 0
            assert int(both.mel_lengths[row]) == frames
            torch.testing.assert_close(both.mel[row, :frames], single.mel[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(both.pitch[row, :length], single.pitch[0], atol=1e-5, rtol=1e-4)
            assert not both.mel[row, frames:].any()


def test_all_durations_zero_gives_one_silent_row_and_no_nan():
    output = tiny()(torch.randn(2, 4, 16), torch.tensor([4, 4]), torch.tensor([[0, 0, 0, 0], [1, 2, 0, 0]]))
    assert output.mel_lengths.tolist() == [0, 3]
    assert torch.isfinite(output.mel).all()
    assert not output.mel[0].any()


def batch(mel_frames: int = 9) -> AcousticBatch:
    torch.manual_seed(2)
    return AcousticBatch(
        lengths=torch.tensor([4, 3]),
        durations=torch.tensor([[3, 2, 4, 0], [2, 3, 0, 0]]),
        pitch=torch.tensor([[180.0, 190, 170, 0], [200, 150, 0, 0]]),
        energy=torch.tensor([[10.0, 20, 30, 0], [5, 6, 0, 0]]),
        mel=torch.randn(2, mel_frames, 80),
        mel_lengths=torch.tensor([9, 5]),
    )


def test_the_loss_ignores_padding():
    model, truth = tiny(), batch()
    inputs = torch.randn(2, 4, 16)
    output = model(inputs, truth.lengths, truth.durations, truth.pitch, truth.energy)
    clean = acoustic_loss(output, truth, model)
    spoiled = dataclasses.replace(truth, mel=truth.mel.clone(), pitch=truth.pitch.clone())
    spoiled.mel[1, 5:] = 1e6
    spoiled.pitch[1, 3:] = 1e6
    assert acoustic_loss(output, spoiled, model).total.item() == pytest.approx(clean.total.item())


def test_the_loss_is_the_sum_of_the_papers_parts():
    model, truth = tiny(), batch()
    output = model(torch.randn(2, 4, 16), truth.lengths, truth.durations, truth.pitch, truth.energy)
    loss = acoustic_loss(output, truth, model)
    frames = [(0, f) for f in range(9)] + [(1, f) for f in range(5)]
    mel = sum((output.mel[r, f] - truth.mel[r, f]).abs().mean().item() for r, f in frames) / len(frames)
    phones = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    errors = [(output.log_durations[p].item() - math.log1p(int(truth.durations[p]))) ** 2 for p in phones]
    spoken = [p for p in phones if truth.durations[p] > 0]
    pitch = [(output.pitch[p].item() - math.log1p(truth.pitch[p].item())) ** 2 for p in spoken]
    assert loss.mel.item() == pytest.approx(mel, rel=1e-4)
    assert loss.duration.item() == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    assert loss.pitch.item() == pytest.approx(sum(pitch) / len(pitch), rel=1e-4)
    assert loss.total.item() == pytest.approx(sum(p.item() for p in (loss.mel, loss.duration, loss.pitch, loss.energy)))


def test_gradients_reach_every_parameter():
    model, truth = tiny().train(), batch()
    output = model(model.embed(torch.randint(0, 12, (2, 4))), truth.lengths, truth.durations, truth.pitch, truth.energy)
    acoustic_loss(output, truth, model).total.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


def test_statistics_travel_with_the_weights():
    model, other = tiny(), tiny(seed=3)
    model.set_statistics(
        torch.full((80,), -5.0), torch.full((80,), 2.0), torch.tensor([5.2, 0.1]), torch.tensor([4, 0.9])
    )
    other.load_state_dict(model.state_dict())
    inputs, lengths, durations = torch.randn(1, 3, 16), torch.tensor([3]), torch.tensor([[2, 2, 0]])
    a, b = model(inputs, lengths, durations), other(inputs, lengths, durations)
    assert torch.equal(a.mel, b.mel)
    assert torch.equal(a.pitch, b.pitch)
    assert a.pitch[0, 0].item() == pytest.approx(5.2, abs=0.5)


def test_targets_cover_the_spoken_frames_exactly():
    seconds = torch.arange(16000) / 16000
    samples = 0.3 * torch.sin(2 * torch.pi * 200 * seconds)
    targets = acoustic_targets(samples, parse_alignment("pau:0.2 w:0.3 eh:0.55 pau:0.6 r:0.8 pau:1.0"))
    assert targets.units == ("w", "eh", "pau", "r", "</s>")
    assert int(targets.durations.sum()) == targets.mel.shape[0]
    assert targets.first_frame == round(0.2 * 62.5)
    assert targets.durations[-1] == 0
    assert targets.pitch[-1] == 0
    torch.testing.assert_close(targets.pitch[:-1], torch.full((4,), 200.0), atol=2.0, rtol=0)


def test_a_phone_of_no_frames_takes_the_nearest_frames_pitch():
    samples = 0.3 * torch.sin(2 * torch.pi * 200 * torch.arange(16000) / 16000)
    targets = acoustic_targets(samples, [("a", 0.4), ("b", 0.401), ("c", 0.9)])
    assert targets.durations.tolist()[1] == 0
    assert targets.pitch[1].item() == pytest.approx(200, abs=3)


def test_gaps_in_a_pitch_contour_are_bridged():
    contour = torch.tensor([0.0, 100.0, 0.0, 0.0, 130.0, 0.0])
    assert interpolate_pitch(contour).tolist() == pytest.approx([100, 100, 110, 120, 130, 130])
    assert interpolate_pitch(torch.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "at least one phone"), ("a:0.5 b:0.4", "rising"), ("a", "phone:end"), ("a:x", "phone:end")],
)
def test_bad_alignments_are_refused(text: str, words: str):
    with pytest.raises(InputError, match=words):
        parse_alignment(text)


@pytest.mark.parametrize(
    ("phones", "words"), [([("pau", 0.5)], "other than silence"), ([("a", 2.0)], "must last as long as")]
)
def test_targets_that_cannot_be_made_are_refused(phones: list[tuple[str, float]], words: str):
    with pytest.raises(InputError, match=words):
        acoustic_targets(torch.zeros(16000), phones)
