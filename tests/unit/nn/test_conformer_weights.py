"""fairseq2's own s2t_conformer against ours: same weights, same inputs, same outputs; and the names, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmdec.errors import InputError
from mmdec.nn import conformer as conformer_weights
from mmdec.nn.conformer import SpeechEncoder

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "s2t_conformer.safetensors")


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((GOLDEN / "s2t_conformer.json").read_text())


@pytest.fixture(scope="module")
def theirs(golden: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("weights."): value for name, value in golden.items() if name.startswith("weights.")}


def encode(state: dict[str, Tensor], features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    encoder = SpeechEncoder(conformer_weights.encoder_config(state)).eval()
    encoder.load_state_dict(state)
    with torch.no_grad():
        states, state_lengths, _ = encoder(features, lengths)
    return states, state_lengths


def worst(states: Tensor, golden: dict[str, Tensor]) -> float:
    """Largest difference on the frames that are real; NaN if there is one, which no bound then accepts."""
    rows = zip(states, golden["outputs"], golden["output_lengths"], strict=True)
    return float(torch.stack([(row[:n] - expected[:n]).abs().max() for row, expected, n in rows]).max())


def test_golden_file_is_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.glob("s2t_conformer.*")) < 100_000


def test_config_is_read_off_the_weights(theirs: dict[str, Tensor], record: dict) -> None:
    ours = conformer_weights.encoder_config(conformer_weights.from_fairseq2(theirs))
    config = record["config"]
    assert (ours.features, ours.channels) == (config["num_fbank_channels"], record["subsampler_channels"])
    assert (ours.d_model, ours.ffn) == (config["model_dim"], config["ffn_inner_dim"])
    assert (ours.heads, ours.layers) == (config["num_encoder_attn_heads"], config["num_encoder_layers"])
    assert ours.kernel == config["depthwise_conv_kernel_size"]


def test_outputs_equal_fairseq2(golden: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    states, lengths = encode(conformer_weights.from_fairseq2(theirs), golden["inputs"], golden["lengths"])
    assert lengths.tolist() == golden["output_lengths"].tolist() == [14, 10]
    assert states.shape == golden["outputs"].shape
    assert worst(states, golden) <= 1e-5


def test_outputs_of_single_recordings_equal_fairseq2(golden: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    state = conformer_weights.from_fairseq2(theirs)
    for features, n, expected, m in zip(
        golden["inputs"], golden["lengths"], golden["outputs"], golden["output_lengths"], strict=True
    ):
        states, _ = encode(state, features[None, :n], n[None])
        torch.testing.assert_close(states[0], expected[:m], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-5), (torch.bfloat16, 0.2)])
def test_an_encoder_cast_as_a_whole_still_runs(
    golden: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype, most: float
) -> None:
    state = conformer_weights.from_fairseq2(theirs)
    encoder = SpeechEncoder(conformer_weights.encoder_config(state)).eval()
    encoder.load_state_dict(state)
    with torch.no_grad():
        states, _, _ = encoder.to(dtype)(golden["inputs"].to(dtype), golden["lengths"])
    assert states.dtype == dtype
    assert worst(states, golden) <= most


def test_padding_does_not_change_outputs(golden: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    features = golden["inputs"].clone()
    for row, n in zip(features, golden["lengths"], strict=True):
        row[n:] = float("nan")
    states, _ = encode(conformer_weights.from_fairseq2(theirs), features, golden["lengths"])
    assert worst(states, golden) <= 1e-5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("self_attn.pos_bias_u", "self_attn.pos_bias_v"),
        ("self_attn.linear_q", "self_attn.linear_k"),
        ("self_attn.linear_v", "self_attn.linear_out"),
        ("ffn1.w_1", "ffn2.w_1"),
        ("ffn1.layer_norm", "ffn2.layer_norm"),
        ("conv_module.layer_norm", "final_layer_norm"),
    ],
)
def test_a_perturbed_map_is_caught(
    golden: dict[str, Tensor], theirs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    table = conformer_weights.BLOCK_NAMES
    names = {one: table[other], other: table[one]}
    for module, name in names.items():
        monkeypatch.setitem(table, module, name)
    states, _ = encode(conformer_weights.from_fairseq2(theirs), golden["inputs"], golden["lengths"])
    assert worst(states, golden) > 1e-3


def test_a_wrong_running_statistic_is_caught(golden: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name in ("running_mean", "running_var"):
        state = conformer_weights.from_fairseq2(theirs)
        key = f"conformer_layers.1.conv_module.batch_norm.{name}"
        state[key] = torch.ones_like(state[key])
        states, _ = encode(state, golden["inputs"], golden["lengths"])
        assert worst(states, golden) > 1e-3


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_fairseq(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same weights under fairseq's names."""
    return {f"encoder.{name}": value for name, value in ours.items()}


def test_round_trips_are_the_identity(theirs: dict[str, Tensor]) -> None:
    ours = conformer_weights.from_fairseq2(theirs)
    assert same(conformer_weights.to_fairseq2(ours), theirs)
    assert same(conformer_weights.from_fairseq2(conformer_weights.to_fairseq2(ours)), ours)
    assert same(conformer_weights.from_fairseq(in_fairseq(ours)), ours)


def test_fairseq_names_are_those_that_fairseq2_reads(theirs: dict[str, Tensor], record: dict) -> None:
    """The golden record holds fairseq2's own translation of fairseq's names: ours must agree with it."""
    fairseq = {name: theirs[translated] for name, translated in record["fairseq_names"].items()}
    assert same(conformer_weights.from_fairseq(fairseq), conformer_weights.from_fairseq2(theirs))


def test_other_parts_of_a_model_are_left_out(theirs: dict[str, Tensor]) -> None:
    ours = conformer_weights.from_fairseq2(theirs)
    rest = {"decoder.layers.0.ffn.inner_proj.weight": torch.zeros(2), "final_proj.weight": torch.zeros(2)}
    assert same(conformer_weights.from_fairseq2(theirs | rest), ours)
    rest = {"decoder.embed_tokens.weight": torch.zeros(2), "tts.out_proj.weight": torch.zeros(2)}
    assert same(conformer_weights.from_fairseq(in_fairseq(ours) | rest), ours)


def test_missing_and_unexpected_names_are_reported(theirs: dict[str, Tensor]) -> None:
    ours = conformer_weights.from_fairseq2(theirs)
    fairseq = in_fairseq(ours)
    cases = [
        (conformer_weights.from_fairseq2, theirs, "encoder.layers.1.self_attn.sdpa.v_bias"),
        (conformer_weights.from_fairseq, fairseq, "encoder.conformer_layers.0.self_attn.linear_pos.weight"),
        (conformer_weights.to_fairseq2, ours, "conformer_layers.1.conv_module.batch_norm.running_var"),
    ]
    for convert, state, name in cases:
        with pytest.raises(InputError, match=f"lacks {name}\\. Pass"):
            convert({key: value for key, value in state.items() if key != name})
        with pytest.raises(InputError, match=r"has the unexpected encoder\.layers\.0\.extra\. Pass"):
            convert(state | {"encoder.layers.0.extra": torch.zeros(1)})
        with pytest.raises(InputError, match=r"lacks .* and \d+ more"):
            convert({})


def test_wrong_shapes_are_reported(theirs: dict[str, Tensor]) -> None:
    name = "encoder.layers.1.ffn1.inner_proj.weight"
    with pytest.raises(InputError, match=r"w_1\.weight is \(3, 16\) where the others ask for \(32, 16\)"):
        conformer_weights.from_fairseq2(theirs | {name: torch.zeros(3, 16)})
    with pytest.raises(InputError, match="sizes cannot be read from"):
        conformer_weights.from_fairseq2(theirs | {"encoder_frontend.proj.weight": torch.zeros(())})
    with pytest.raises(InputError, match="sizes cannot be read from"):
        conformer_weights.encoder_config({})
