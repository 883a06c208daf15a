"""Tests augmentation: shapes, masks within their bounds, padding that stays zero, and monotone time warps."""

import pytest
import torch

from mmdec.daspeech.training.module import Augmentation

LENGTHS = torch.tensor([120, 60, 9])


def ones() -> torch.Tensor:
    features = torch.zeros(3, 120, 80)
    for row, length in enumerate(LENGTHS.tolist()):
        features[row, :length] = 1.0
    return features


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_bounded(seed: int):
    torch.manual_seed(seed)
    made, lengths = Augmentation()(ones(), LENGTHS)
    assert torch.equal(lengths, LENGTHS)
    assert made.shape == (3, 120, 80)
    for row, length in enumerate(LENGTHS.tolist()):
        assert not made[row, length:].any()
        masked_frames = (made[row, :length] == 0).all(1)
        masked_bands = (made[row, :length] == 0).all(0)
        assert masked_frames.sum() <= min(100, 0.2 * length) + 1
        assert masked_bands.sum() <= 27 + 1
        assert set(made[row].unique().tolist()) <= {0.0, 1.0}
        for masked in (masked_frames, masked_bands):  # one run each
            places = masked.nonzero()[:, 0]
            assert len(places) == 0 or int(places[-1] - places[0]) + 1 == len(places)


def test_each_row_gets_a_mask_of_its_own():
    torch.manual_seed(0)
    made, _ = Augmentation(time_masks=0)(torch.ones(8, 50, 80), torch.full((8,), 50))
    assert len({tuple((row == 0).all(0).tolist()) for row in made}) > 4


def test_augmentation_of_zero_changes_nothing():
    features = torch.randn(3, 120, 80) * ones()
    made, lengths = Augmentation(frequency_masks=0, time_masks=0)(features, LENGTHS)
    assert torch.equal(made, features)
    assert torch.equal(lengths, LENGTHS)


def test_a_warp_of_nothing_is_the_identity():
    features = torch.randn(3, 120, 80) * ones()
    made, lengths = Augmentation(frequency_masks=0, time_masks=0, time_warp=1e-12)(features, LENGTHS)
    assert torch.equal(lengths, LENGTHS)
    torch.testing.assert_close(made, features, atol=1e-4, rtol=0)


def test_a_change_of_pace_changes_lengths_within_bounds():
    torch.manual_seed(1)
    augment = Augmentation(frequency_masks=0, time_masks=0, time_warp=0.1)
    seen = set()
    for _ in range(10):
        made, lengths = augment(ones(), LENGTHS)
        assert made.shape == (3, int(lengths.max()), 80)
        for row, (new, old) in enumerate(zip(lengths.tolist(), LENGTHS.tolist(), strict=True)):
            assert max(8, int(old / 1.1) - 1) <= new <= old / 0.9
            torch.testing.assert_close(made[row, :new], torch.ones(new, 80))
            assert not made[row, new:].any()
        seen.add(int(lengths[0]))
    assert len(seen) > 3


def test_the_pace_stretches_time_evenly():
    torch.manual_seed(2)
    ramp = torch.linspace(0, 1, 100)[None, :, None].expand(1, 100, 80).contiguous()
    made, lengths = Augmentation(frequency_masks=0, time_masks=0, time_warp=0.2)(ramp, torch.tensor([100]))
    assert int(lengths) != 100
    torch.testing.assert_close(made[0, :, 40], torch.linspace(0, 1, int(lengths)), atol=1e-4, rtol=0)


def test_the_stretch_moves_bands():
    torch.manual_seed(3)
    bands = torch.linspace(0, 1, 80).expand(1, 30, 80).contiguous()
    made, lengths = Augmentation(frequency_masks=0, time_masks=0, frequency_warp=0.1)(bands, torch.tensor([30]))
    assert int(lengths) == 30
    slope = made[0, 15, 40] / bands[0, 15, 40]
    assert 0.9 <= slope <= 1.1
    assert slope != 1.0
    torch.testing.assert_close(made[0, 15, :70], bands[0, 15, :70] * slope, atol=1e-4, rtol=0)


def test_the_seed_determines_the_augmentation():
    augment, features = Augmentation(time_warp=0.1, frequency_warp=0.1), torch.randn(3, 120, 80)
    torch.manual_seed(7)
    first = augment(features, LENGTHS)
    torch.manual_seed(7)
    again = augment(features, LENGTHS)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
