"""The speech encoder: independence of the batch, lengths, sizes that are refused. Weights: test_conformer_weights."""

import pytest
import torch

from mmdec.errors import InputError
from mmdec.nn.conformer import EncoderConfig, SpeechEncoder, lengths_to_mask, relative_positions

TINY = EncoderConfig(channels=32, d_model=32, ffn=48, heads=4, layers=2, kernel=7)


def tiny() -> SpeechEncoder:
    torch.manual_seed(0)
    model = SpeechEncoder(TINY)
    for layer in model.conformer_layers:  # statistics that a trained model would have
        layer.conv_module.batch_norm.running_mean.normal_()
        layer.conv_module.batch_norm.running_var.uniform_(0.5, 2.0)
    return model.eval()


def test_a_batch_equals_its_rows_alone():
    model = tiny()
    lengths = torch.tensor([61, 1, 40, 9])
    features = torch.full((4, 61, 80), torch.nan)  # padding may hold anything
    for row, length in enumerate(lengths.tolist()):
        features[row, :length] = torch.randn(length, 80)
    with torch.inference_mode():
        states, state_lengths, _ = model(features, lengths)
        assert state_lengths.tolist() == [-(-length // 4) for length in lengths.tolist()]
        for row, length in enumerate(lengths.tolist()):
            single, alone_length, _ = model(features[row : row + 1, :length], lengths[row : row + 1])
            assert single.shape == (1, int(alone_length), 32)
            torch.testing.assert_close(states[row, : int(alone_length)], single[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("frames", "states"), [(1, 1), (4, 1), (5, 2), (8, 2), (100, 25), (101, 26), (1500, 375)])
def test_subsampling_gives_a_quarter_of_the_frames_rounded_up(frames: int, states: int):
    lengths = torch.tensor([frames])
    with torch.inference_mode():
        made, state_lengths = tiny().subsample(torch.randn(1, frames, 80), lengths)
    assert made.shape == (1, states, 32)
    assert state_lengths.item() == states


def test_the_middle_layer_is_the_one_that_is_named():
    model, features, lengths = tiny(), torch.randn(1, 30, 80), torch.tensor([30])
    with torch.inference_mode():
        states, _, middle = model(features, lengths, middle=1)
        assert middle is not None
        last = model(features, lengths, middle=2)
        assert torch.equal(last[2], last[0])
        assert not torch.allclose(middle, states)
        assert model(features, lengths)[2] is None


def test_attention_sees_distances():
    """Row i, column j of the position scores must hold the entry of distance i - j."""
    model = tiny()
    attention = model.conformer_layers[0].self_attn
    with torch.inference_mode():
        for linear in (attention.linear_q, attention.linear_k):
            linear.weight.zero_()
            linear.bias.zero_()
        attention.linear_v.weight.copy_(torch.eye(32))
        attention.linear_out.weight.copy_(torch.eye(32))
        for linear in (attention.linear_v, attention.linear_out):
            linear.bias.zero_()
        size, x = 6, torch.randn(1, 6, 32)
        places = relative_positions(size, 32, x.device)
        result = attention(x, places, torch.zeros(1, 1, 1, size))[0]
        expected = torch.zeros(size, 32)
        for head in range(4):
            part = slice(8 * head, 8 * head + 8)
            for i in range(size):
                scores = []
                for j in range(size):
                    place = attention.linear_pos(places[size - 1 - (i - j)])[part]
                    scores.append(attention.pos_bias_v[head] @ place / 8**0.5)
                expected[i, part] = torch.stack(scores).softmax(0) @ x[0, :, part]
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_positions_name_distances_not_places():
    longer, shorter = (relative_positions(size, 16, torch.device("cpu")) for size in (9, 5))
    torch.testing.assert_close(longer[4:-4], shorter)
    assert shorter[4].tolist() == [0.0, 1.0] * 8  # distance 0


def test_a_double_or_bfloat16_encoder_runs():
    for dtype in (torch.float64, torch.bfloat16):
        with torch.inference_mode():
            states, _, _ = tiny().to(dtype)(torch.randn(1, 20, 80, dtype=dtype), torch.tensor([20]))
        assert states.dtype == dtype
        assert states.isfinite().all()


def test_lengths_become_masks():
    assert lengths_to_mask(torch.tensor([2, 0]), 3).tolist() == [[True, True, False], [False] * 3]


@pytest.mark.parametrize("sizes", [{"kernel": 30}, {"d_model": 250}, {"heads": 3}, {"d_model": 255, "heads": 5}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int]):
    with pytest.raises(InputError, match=r"`(kernel|d_model)` must"):
        EncoderConfig(**sizes)
