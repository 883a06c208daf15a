"""Tests mmdec's pass of a draft through Whisper's decoder: transformers' numbers, hooks, and when it is not used."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from mmdec.compat import CACHE_ARGUMENT
from mmdec.kernels.float16_linear import MIN_PASSES_BEFORE_COPY, HalfWeights, half_precision_copies
from mmdec.targets.kv_cache import KVPool
from mmdec.whisper import decoder as whisper_decoder
from mmdec.whisper.decoder import FastDecoder
from tests.support.tiny_whisper import FRAMES, whisper


def both(network: Any, batch: int, nodes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Last hidden states of a random tree, by the decoder itself and by the draft's pass, twice in a row."""
    torch.manual_seed(seed)
    decoder = network.model.decoder
    states = torch.randn(batch, FRAMES // 2, 32)
    found: list[Tensor] = []
    for run in (decoder, FastDecoder(decoder)):
        torch.manual_seed(seed + 1)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        outs = []
        with torch.inference_mode():
            decoder(
                torch.randint(60, (batch, 5)), encoder_hidden_states=states, **{CACHE_ARGUMENT: cache}, use_cache=True
            )
            store = KVPool(cache)
            for length in (5, 5 + nodes):
                seen = torch.rand(batch, 1, nodes, length + nodes) < 0.6
                seen[..., 0] = True
                mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
                out = run(
                    input_ids=torch.randint(60, (batch, nodes)),
                    attention_mask=mask,
                    position_ids=torch.randint(5, 20, (batch, nodes)),
                    encoder_hidden_states=states,
                    **{CACHE_ARGUMENT: cache},
                    use_cache=True,
                )
                outs.append(out.last_hidden_state)
            store.crop(5)
        found.append(torch.stack(outs))
    return found[0], found[1]


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (1, 9), (3, 4)])
def test_states_equal_the_decoders_bitwise(batch: int, nodes: int) -> None:
    wanted, found = both(whisper(), batch, nodes)
    assert torch.equal(wanted, found)


@pytest.mark.parametrize(("batch", "nodes"), [(1, 2), (1, 5), (2, 2), (1, 6), (1, 13)])
@pytest.mark.parametrize("intel", [False, True])
def test_states_of_large_layers_equal_up_to_rounding(
    batch: int, nodes: int, intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whisper_decoder, "MIN_ONEDNN_ELEMENTS", 1)
    monkeypatch.setattr(whisper_decoder, "is_intel", lambda: intel)
    wanted, found = both(whisper(), batch, nodes)
    assert torch.allclose(wanted, found, atol=1e-5)
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_float32_keys_are_turned_on_intel_cpus(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whisper_decoder, "is_intel", lambda: True)
    network, cache = whisper().to(dtype), EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.inference_mode():
        FastDecoder(network.model.decoder).store_encoder_states(torch.randn(1, FRAMES // 2, 32, dtype=dtype), cache)
    keys = cache.cross_attention_cache.layers[0].keys
    assert keys is not None
    turned = dtype == torch.float32  # torch's attention in half precision is far slower with such keys
    assert (keys.transpose(2, 3) if turned else keys).is_contiguous()


class Doubled(nn.Module):
    """Something else where a linear layer was, as an adapter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def test_adapters_and_hooks_keep_working() -> None:
    network: Any = whisper()
    plain, _ = both(network, 1, 3)
    layer = network.model.decoder.layers[1]
    layer.fc1 = Doubled(layer.fc1)
    layer.self_attn.v_proj.register_forward_hook(lambda _module, _args, out: 3 * out)
    layer.final_layer_norm.register_forward_hook(lambda _module, _args, out: out + 0.5)
    layer.encoder_attn.q_proj.forward = lambda x: torch.zeros_like(x)  # type: ignore[method-assign]
    assert FastDecoder.can_replace(network.model.decoder)
    wanted, found = both(network, 1, 3)
    assert torch.equal(wanted, found)
    assert not torch.equal(wanted, plain)


def test_hooks_on_the_decoder_are_called() -> None:
    network: Any = whisper()
    decoder = network.model.decoder
    seen: list[Any] = []
    handles = [
        decoder.register_forward_pre_hook(lambda _module, _args, given: seen.append(sorted(given)), with_kwargs=True),
        decoder.register_forward_hook(lambda _module, _args, out: seen.append(tuple(out.last_hidden_state.shape))),
    ]
    both(network, 2, 3)
    passes = seen[-4:]  # of the draft's pass
    assert passes[1] == passes[3] == (2, 3, 32)
    assert {"input_ids", CACHE_ARGUMENT, "position_ids"} <= set(passes[0])
    for handle in handles:
        handle.remove()
    count = len(seen)
    both(network, 1, 1)
    assert len(seen) == count


def test_unknown_decoders_are_not_replaced() -> None:
    assert FastDecoder.can_replace(whisper().model.decoder)
    other: Any = whisper()
    other.set_attn_implementation("eager")
    assert not FastDecoder.can_replace(other.model.decoder)
    other: Any = whisper()
    other.model.decoder.layers[1].register_forward_hook(lambda *_: None)
    assert not FastDecoder.can_replace(other.model.decoder)
    other: Any = whisper()
    other.model.decoder.layers[0].encoder_attn.register_forward_pre_hook(lambda *_: None)
    assert not FastDecoder.can_replace(other.model.decoder)
    other: Any = whisper()
    layer: Any = other.model.decoder.layers[0]
    layer.forward = layer.forward
    assert not FastDecoder.can_replace(other.model.decoder)
    other: Any = whisper()
    other.model.decoder.layers[0] = Doubled(other.model.decoder.layers[0])
    assert not FastDecoder.can_replace(other.model.decoder)
    assert not FastDecoder.can_replace(whisper().train().model.decoder)
    assert not FastDecoder.can_replace(nn.Identity())


def test_recorders_of_hidden_states_do_not_prevent_it() -> None:
    """transformers leaves them on a model for ever, once somebody has asked for hidden states."""
    network: Any = whisper()
    wanted, _ = both(network, 1, 3)
    states = torch.zeros(1, FRAMES // 2, 32)
    network.model.decoder(torch.tensor([[5]]), encoder_hidden_states=states, output_hidden_states=True)
    assert any(layer._forward_hooks for layer in network.model.decoder.layers)
    assert FastDecoder.can_replace(network.model.decoder)
    again, found = both(network, 1, 3)
    assert torch.equal(again, wanted)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (1, 5), (2, 3), (1, 9)])
@pytest.mark.parametrize("large", [1, whisper_decoder.MIN_ONEDNN_ELEMENTS])
def test_half_precision_weights_are_used_directly(
    batch: int, nodes: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whisper_decoder, "MIN_ONEDNN_ELEMENTS", large)
    network = whisper()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(weight.half())
    wanted, _ = both(network, batch, nodes)
    copies = half_precision_copies(network.model.decoder)
    copies.passes = MIN_PASSES_BEFORE_COPY
    called: list[int] = []
    product = HalfWeights.__call__
    monkeypatch.setattr(HalfWeights, "__call__", lambda self, x: called.append(1) or product(self, x))
    _, found = both(network, batch, nodes)
    assert len(called) == (2 * 6 * len(network.model.decoder.layers) if copies.usable else 0)
    assert torch.allclose(wanted, found, atol=1e-5)


def test_unrepresentable_weights_stay_in_float32() -> None:
    network = whisper()
    copies = half_precision_copies(network.model.decoder)
    copies.passes = MIN_PASSES_BEFORE_COPY
    both(network, 1, 3)
    assert not copies.usable
