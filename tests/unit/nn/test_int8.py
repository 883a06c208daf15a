"""Tests weights in 8 bits with a scale for each row: small errors, other tensors unchanged, damaged files refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmdec.errors import InputError
from mmdec.nn.int8 import SCALE_SUFFIX, pack_rows, quantise_rows, unpack_rows


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "linear.weight": torch.randn(64, 128, generator=draw) * torch.logspace(-6, 3, 64)[:, None],
        "conv.weight": torch.randn(64, 32, 3, generator=draw),
        "linear.bias": torch.randn(64, generator=draw).half().float(),
        "few.weight": torch.randn(4, 4, generator=draw).half().float(),
        "count": torch.tensor([3]),
        "temperature.scale": torch.ones(3),
    }


def test_int8_rows_keep_two_digits_and_other_tensors_stay(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(pack_rows(state), tmp_path / "x.safetensors")
    packed = load_file(tmp_path / "x.safetensors")
    assert packed["conv.weight"].dtype == torch.int8
    back = unpack_rows(packed)
    assert back.keys() == state.keys()
    for name in ("linear.weight", "conv.weight"):
        assert back[name].dtype == torch.float32
        error = (back[name] - state[name]).flatten(1).norm(dim=1) / state[name].flatten(1).norm(dim=1)
        assert error.max() < 0.01
    for name in ("linear.bias", "few.weight", "count", "temperature.scale"):
        assert torch.equal(back[name], state[name])


def test_packing_unpacked_weights_gives_the_same_bytes(state: dict[str, torch.Tensor]) -> None:
    packed = pack_rows(state)
    again = pack_rows(unpack_rows(packed))
    assert again.keys() == packed.keys()
    for name, value in packed.items():
        assert torch.equal(again[name], value), name
    assert (packed["linear.weight"].abs().amax(1) == 127).all()


def test_rows_of_zeros_stay_zeros() -> None:
    assert torch.equal(quantise_rows(torch.zeros(2, 3))[0], torch.zeros(2, 3, dtype=torch.int8))


@pytest.mark.parametrize("broken", [torch.ones(63), torch.ones(64, 2)])
def test_scales_of_another_shape_are_refused(state: dict[str, torch.Tensor], broken: torch.Tensor) -> None:
    packed = pack_rows(state)
    packed["linear.weight" + SCALE_SUFFIX] = broken
    with pytest.raises(InputError, match="`model` must hold int8 rows"):
        unpack_rows(packed)
    with pytest.raises(InputError, match="`start` must hold int8 rows"):
        unpack_rows(packed, "start")
