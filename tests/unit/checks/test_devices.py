"""Tests the checks of devices and dtypes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import mmdec
from mmdec.checks.devices import check_dtype, check_same_dtype, fastest_dtype
from mmdec.cli.options import resolve_dtype
from mmdec.errors import InputError
from tests.conftest import RATE, buzz
from tests.support.grid import slow_but
from tests.support.pictures import pixels
from tests.support.tiny_vlm_folder import write as write_vlm
from tests.support.tiny_whisper import write as write_whisper


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (None, torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes_are_parsed(given: Any, result: torch.dtype) -> None:
    assert check_dtype(given) == result


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("float8_e4m3fn", "'float8_e4m3fn'"),
        (torch.int8, "torch.int8"),
        ("Tensor", "'Tensor'"),
        ("", "''"),
        (16, "16"),
        (["float32"], "['float32']"),
    ],
)
def test_unknown_dtypes_are_refused(given: Any, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        check_dtype(given)
    assert str(caught.value).startswith(f"`dtype` must be float32, bfloat16, float16 or float64, but is {shown}.")


@pytest.mark.parametrize(
    ("gpu", "computes", "device", "result"),
    [
        (False, False, None, torch.float32),
        (True, True, None, torch.bfloat16),
        (True, True, "cpu", torch.float32),
        (True, False, None, torch.float32),  # an old one
    ],
)
def test_the_command_line_takes_the_fastest_dtype(
    gpu: bool, computes: bool, device: str | None, result: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: computes)
    assert fastest_dtype(device) == resolve_dtype(None, device) == result
    assert resolve_dtype("float16", device) == torch.float16


def test_a_loaded_models_dtype_is_kept() -> None:
    check_same_dtype(None, torch.bfloat16)
    check_same_dtype("bfloat16", torch.bfloat16)
    with pytest.raises(InputError, match=r"must be that of the loaded `model`, torch\.float32, but is bfloat16"):
        check_same_dtype("bfloat16", torch.float32)


@pytest.mark.parametrize("timestamps", [None, "segment", "word"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transcribing_takes_a_dtype(dtype: str, timestamps: Any, tmp_path: Path) -> None:
    """The text is that of the same model in the same precision."""
    folder = write_whisper(tmp_path / "tiny")
    options: dict[str, Any] = {"model": folder, "device": "cpu", "language": "en", "sample_rate": RATE}
    options |= {"timestamps": timestamps, "max_new_tokens": 6}
    drafted = mmdec.transcribe(buzz(0.7), dtype=dtype, drafter="lookup", **options)
    plain = mmdec.transcribe(buzz(0.7), dtype=getattr(torch, dtype), drafter=None, **options)
    assert drafted.tokens == plain.tokens
    loaded: Any = mmdec.load(folder, "cpu", dtype=dtype)
    assert loaded.model.dtype == getattr(torch, dtype)
    with pytest.raises(InputError, match="`dtype` must be that of the loaded"):
        mmdec.transcribe(buzz(0.7), dtype="float32", **options | {"model": loaded})


def test_describing_takes_a_dtype(tmp_path: Path) -> None:
    folder = write_vlm(tmp_path / "tiny")
    out = mmdec.describe(pixels(0), model=folder, device="cpu", dtype="bfloat16", max_new_tokens=4)
    assert len(out.tokens) <= 4
    loaded: Any = mmdec.load(folder, "cpu", dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16


class Products(TorchFunctionMode):
    """Records what linear layers give, modules or not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            self.seen.append(out.dtype)
        return out


@pytest.mark.parametrize("strategy", ["lookahead", "joint-viterbi", "verified"])
def test_translating_takes_a_dtype(strategy: str, any_model: Path) -> None:
    """Products in bfloat16; what the vocoder reads and what is handed out is float32."""
    read: list[torch.dtype] = []
    loaded: Any = mmdec.load(any_model, "cpu", dtype="bfloat16")
    hook = loaded.vocoder.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0].dtype))
    try:
        with Products() as products:
            out = mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=loaded, strategy=strategy)
    finally:
        hook.remove()
    assert out.audio.dtype == "float32"
    assert (products.seen[0], read[-1]) == (torch.bfloat16, torch.float32)
    assert loaded is not mmdec.load(any_model, "cpu")


@pytest.mark.parametrize("dtype", slow_but(["bfloat16", "float16"], ["bfloat16"]))
def test_half_precision_keeps_a_shipped_translators_units(dtype: str) -> None:
    """Features in half precision would end it: there was no unit left."""
    heard = mmdec.audio.load_audio(Path("data/samples/appeler_demain.wav"))
    options: dict[str, Any] = {"sample_rate": RATE, "device": "cpu"}
    out = mmdec.translate_speech(heard, dtype=dtype, **options)
    assert out.units == mmdec.translate_speech(heard, **options).units


def test_a_translator_refuses_double_precision(tiny_model: Path) -> None:
    with pytest.raises(InputError, match="`dtype` must be float32, bfloat16 or float16 for a translator"):
        mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=tiny_model, device="cpu", dtype="float64")


@pytest.mark.parametrize("name", ["describe", "load", "transcribe", "translate_speech"])
def test_a_call_takes_a_dtype(name: str) -> None:
    """`generate` and `stream` take it among their options: `tests/unit/generation/test_speculation.py`."""
    assert inspect.signature(getattr(mmdec, name)).parameters["dtype"].default is None
