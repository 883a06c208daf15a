"""A DASpeech in its authors' format (fairseq's names, shapes and files) with random weights, and a simple reference.

The names and shapes are those of the authors' modules (github.com/ictnlp/DASpeech, 65c3684). The reference follows the
papers' equations on one row, in float64, from the published names alone.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

PHONES = ("HH", "AH0", "L", "OW1", "DH", "EH1", "R", "spn")
RANGES = {"pitch_min": 1e-8, "pitch_max": 6.6110, "energy_min": 1e-8, "energy_max": 5.7056}
PAPER: dict[str, Any] = {
    "encoder_layers": 12,
    "encoder_embed_dim": 256,
    "encoder_ffn_embed_dim": 2048,
    "encoder_attention_heads": 4,
    "conv_channels": 1024,
    "depthwise_conv_kernel_size": 31,
    "decoder_layers": 4,
    "decoder_embed_dim": 512,
    "decoder_ffn_embed_dim": 2048,
    "decoder_attention_heads": 8,
    "adaptor_ffn_dim": 1024,
    "tts_encoder_layers": 4,
    "tts_encoder_embed_dim": 256,
    "tts_encoder_attention_heads": 4,
    "tts_decoder_layers": 4,
    "tts_decoder_embed_dim": 256,
    "tts_decoder_attention_heads": 4,
    "fft_hidden_dim": 1024,
    "fft_kernel_size": 9,
    "var_pred_n_bins": 256,
    "var_pred_hidden_dim": 256,
    "var_pred_kernel_size": 3,
    "max_target_positions": 1024,
    "src_upsample_scale": 0.5,
}
SMALL = PAPER | {
    "encoder_layers": 2,
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 2,
    "conv_channels": 12,
    "depthwise_conv_kernel_size": 5,
    "decoder_layers": 2,
    "decoder_embed_dim": 24,
    "decoder_ffn_embed_dim": 20,
    "decoder_attention_heads": 3,
    "adaptor_ffn_dim": 10,
    "tts_encoder_layers": 1,
    "tts_encoder_embed_dim": 16,
    "tts_encoder_attention_heads": 2,
    "tts_decoder_layers": 2,
    "tts_decoder_embed_dim": 16,
    "tts_decoder_attention_heads": 2,
    "fft_hidden_dim": 14,
    "fft_kernel_size": 5,
    "var_pred_n_bins": 32,
    "var_pred_hidden_dim": 12,
    "max_target_positions": 96,
}
ARCHITECTURE = {
    "activation_fn": "gelu",
    "attn_type": "espnet",
    "pos_enc_type": "rel_pos",
    "decoder_learned_pos": True,
    "share_decoder_input_output_embed": True,
    "links_feature": "feature:position",
    "max_transition_length": 99999,
    "decode_strategy": "lookahead",
    "n_frames_per_step": 1,
}


def arguments(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return fairseq's arguments, as they are in a checkpoint."""
    return {**sizes, **ARCHITECTURE, **RANGES}


def shapes(a: dict[str, Any], units: int) -> dict[str, tuple[int, ...]]:
    """List every tensor in the authors' state dict: name -> shape."""
    named: dict[str, tuple[int, ...]] = {}

    def linear(name: str, size_in: int, size_out: int, bias: bool = True) -> None:
        named[f"{name}.weight"] = (size_out, size_in)
        if bias:
            named[f"{name}.bias"] = (size_out,)

    def conv(name: str, size_in: int, size_out: int, kernel: int) -> None:
        named.update({f"{name}.weight": (size_out, size_in, kernel), f"{name}.bias": (size_out,)})

    def norm(name: str, size: int) -> None:
        named.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    def attention(name: str, size: int, state: int) -> None:
        for part, size_in in (("q", size), ("k", state), ("v", state)):
            linear(f"{name}.{part}_proj", size_in, size)
        linear(f"{name}.out_proj", size, size)

    d, heads = a["encoder_embed_dim"], a["encoder_attention_heads"]
    conv("encoder.subsample.conv_layers.0", 80, a["conv_channels"], 5)
    conv("encoder.subsample.conv_layers.1", a["conv_channels"] // 2, 2 * d, 5)
    linear("encoder.linear", d, d)
    for index in range(a["encoder_layers"]):
        place = f"encoder.conformer_layers.{index}"
        for ffn in ("ffn1", "ffn2"):
            norm(f"{place}.{ffn}.layer_norm", d)
            linear(f"{place}.{ffn}.w_1", d, a["encoder_ffn_embed_dim"])
            linear(f"{place}.{ffn}.w_2", a["encoder_ffn_embed_dim"], d)
        for name in ("self_attn_layer_norm", "conv_module.layer_norm", "final_layer_norm", "conv_module.batch_norm"):
            norm(f"{place}.{name}", d)
        for name in ("q", "k", "v", "out"):
            linear(f"{place}.self_attn.linear_{name}", d, d)
        linear(f"{place}.self_attn.linear_pos", d, d, bias=False)
        for name in ("u", "v"):
            named[f"{place}.self_attn.pos_bias_{name}"] = (heads, d // heads)
        named[f"{place}.conv_module.pointwise_conv1.weight"] = (2 * d, d, 1)
        named[f"{place}.conv_module.depthwise_conv.weight"] = (d, 1, a["depthwise_conv_kernel_size"])
        named[f"{place}.conv_module.pointwise_conv2.weight"] = (d, d, 1)
        named[f"{place}.conv_module.batch_norm.running_mean"] = (d,)
        named[f"{place}.conv_module.batch_norm.running_var"] = (d,)
        named[f"{place}.conv_module.batch_norm.num_batches_tracked"] = ()
    size, vertices = a["decoder_embed_dim"], a["max_target_positions"] + 2
    named |= {"decoder.version": (1,), "decoder.embed_tokens.weight": (units, size)}
    named |= {"decoder.embed_positions.weight": (vertices, size), "decoder.embed_length.weight": (256, d)}
    for index in range(a["decoder_layers"]):
        place = f"decoder.layers.{index}"
        attention(f"{place}.self_attn", size, size)
        norm(f"{place}.self_attn_layer_norm", size)
        attention(f"{place}.encoder_attn", size, d)
        norm(f"{place}.encoder_attn_layer_norm", size)
        linear(f"{place}.fc1", size, a["decoder_ffn_embed_dim"])
        linear(f"{place}.fc2", a["decoder_ffn_embed_dim"], size)
        norm(f"{place}.final_layer_norm", size)
    named |= {"decoder.output_projection.weight": (units, size), "decoder.link_positional.weight": (vertices, size)}
    linear("decoder.query_linear", 2 * size, size)
    linear("decoder.key_linear", 2 * size, size)
    linear("decoder.gate_linear", 2 * size, a["decoder_attention_heads"])
    wide = a["tts_encoder_embed_dim"]
    linear("adaptor.fc1", size, a["adaptor_ffn_dim"])
    linear("adaptor.fc2", a["adaptor_ffn_dim"], wide)
    named |= {"tts.pos_emb_alpha": (1,), "tts.dec_pos_emb_alpha": (1,), "tts.embed_tokens.weight": (units, wide)}
    named["tts.embed_positions._float_tensor"] = (1,)
    for stack in ("encoder", "decoder"):
        for index in range(a[f"tts_{stack}_layers"]):
            place = f"tts.{stack}_fft_layers.{index}"
            attention(f"{place}.self_attn", wide, wide)
            norm(f"{place}.layer_norm", wide)
            conv(f"{place}.ffn.ffn.0", wide, a["fft_hidden_dim"], a["fft_kernel_size"])
            conv(f"{place}.ffn.ffn.2", a["fft_hidden_dim"], wide, a["fft_kernel_size"])
            norm(f"{place}.ffn.layer_norm", wide)
    for name in ("duration", "pitch", "energy"):
        place, inner = f"tts.var_adaptor.{name}_predictor", a["var_pred_hidden_dim"]
        conv(f"{place}.conv1.0", wide, inner, a["var_pred_kernel_size"])
        conv(f"{place}.conv2.0", inner, inner, a["var_pred_kernel_size"])
        norm(f"{place}.ln1", inner)
        norm(f"{place}.ln2", inner)
        linear(f"{place}.proj", inner, 1)
    for name in ("pitch", "energy"):
        named[f"tts.var_adaptor.embed_{name}.weight"] = (a["var_pred_n_bins"], wide)
    linear("tts.out_proj", wide, 80)
    return named


def random_weights(a: dict[str, Any], units: int, seed: int = 7) -> dict[str, Tensor]:
    """Draw every tensor at random, also norms, biases and statistics: their usual 0 and 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, Tensor] = {}
    for name, shape in shapes(a, units).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            drawn[name] = torch.tensor(1000)
        elif name.endswith("running_var"):
            drawn[name] = 0.5 + noise.abs()
        elif name.endswith(("pos_bias_u", "pos_bias_v")) or "embed" in name or "link_positional" in name:
            drawn[name] = 0.7 * noise
        elif len(shape) > 1:
            drawn[name] = noise * noise[0].numel() ** -0.5
        else:
            norms = ("norm.weight", "ln1.weight", "ln2.weight")
            drawn[name] = 0.3 * noise + float(name.endswith((*norms, "emb_alpha")))
    drawn["tts.var_adaptor.duration_predictor.proj.bias"] = torch.tensor([1.2])  # phones of a few frames
    drawn["decoder.embed_tokens.weight"][:4] *= 0.1  # so that special units are seldom the best
    drawn["decoder.output_projection.weight"] = drawn["decoder.embed_tokens.weight"]
    return drawn


def write(folder: Path, a: dict[str, Any] = SMALL) -> dict[str, Tensor]:
    """Write a published folder with random weights. Returns: the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(a, 4 + len(PHONES))
    cfg = {"model": Namespace(**arguments(a)), "optimization": {"max_update": 50_000}}
    torch.save({"args": None, "cfg": cfg, "model": weights, "extra_state": {"epoch": 3}}, folder / "average.pt")
    (folder / "vocab.txt").write_text("".join(f"{phone} {9 - at}\n" for at, phone in enumerate(PHONES)))
    (folder / "config.yaml").write_text(
        "features:\n  energy_max: 5.7056\n  energy_min: 1.0e-08\n  f_max: 8000\n  f_min: 20\n  hop_length: 256\n"
        "  n_fft: 1024\n  pitch_max: 6.6110\n  pitch_min: 1e-08\n  sample_rate: 22050\n  win_length: 1024\n"
        "global_cmvn:\n  stats_npz_path: data/cvss-c/fr-en/tts/gcmvn_stats.npz\nvocab_filename: vocab.txt\n"
    )
    rng = np.random.default_rng(3)
    mean, std = rng.normal(-5, 1, 80).astype(np.float32), rng.uniform(0.5, 2, 80).astype(np.float32)
    np.savez(folder / "gcmvn_stats.npz", mean=mean, std=std)
    write_generator(folder)
    return weights


def write_generator(folder: Path) -> None:
    """Write a narrow HiFi-GAN of V1's shape, with the authors' names."""
    sizes: dict[str, Any] = {"upsample_rates": [8, 8, 2, 2], "upsample_kernel_sizes": [16, 16, 4, 4]}
    sizes |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]], "upsample_initial_channel": 16}
    sizes |= {"resblock": "1", "num_mels": 80, "n_fft": 1024, "hop_size": 256, "win_size": 1024}
    sizes |= {"sampling_rate": 22050, "fmin": 0, "fmax": 8000}
    (folder / "config.json").write_text(json.dumps(sizes))
    generator = torch.Generator().manual_seed(5)
    state: dict[str, Tensor] = {}

    def normed(name: str, *shape: int, bias: int) -> None:
        value = torch.randn(*shape, generator=generator) * 0.1
        state[f"{name}.weight_v"], state[f"{name}.bias"] = value, torch.zeros(bias)
        state[f"{name}.weight_g"] = value.flatten(1).norm(dim=1).view(-1, *[1] * (value.dim() - 1))

    normed("conv_pre", 16, 80, 7, bias=16)
    width = 16
    for at, kernel in enumerate(sizes["upsample_kernel_sizes"]):
        normed(f"ups.{at}", width, width // 2, kernel, bias=width // 2)
        width //= 2
        for stack in ("convs1", "convs2"):
            for step in (0, 1):
                normed(f"resblocks.{at}.{stack}.{step}", width, width, 3, bias=width)
    normed("conv_post", 1, width, 7, bias=1)
    torch.save({"generator": state}, folder / "g_02500000")


class Naive:
    """Computes the papers' layers on one row, in float64, from tensors with the published names."""

    def __init__(self, weights: dict[str, Tensor], a: dict[str, Any]) -> None:
        self.w = {name: value.double() for name, value in weights.items()}
        self.a = a

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (var + 1e-5).sqrt() * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        """Convolve x (T, C), padded with half of the kernel. Returns (T', C')."""
        weight = self.w[f"{name}.weight"]
        return F.conv1d(x.T[None], weight, self.w[f"{name}.bias"], stride, weight.shape[2] // 2)[0].T

    def encode(self, features: Tensor) -> Tensor:
        """Encode features (N, 80). Returns states (S, d)."""
        x = features.double()
        for at in (0, 1):
            left, right = self.conv(x, f"encoder.subsample.conv_layers.{at}", 2).chunk(2, -1)
            x = left * right.sigmoid()
        d = x.shape[1]
        x = self.linear(math.sqrt(d) * x, "encoder.linear")
        for at in range(self.a["encoder_layers"]):
            place = f"encoder.conformer_layers.{at}"
            x = x + 0.5 * self.swished(x, f"{place}.ffn1")
            x = x + self.relative(self.norm(x, f"{place}.self_attn_layer_norm"), f"{place}.self_attn")
            x = x + self.convolved(x, f"{place}.conv_module")
            x = self.norm(x + 0.5 * self.swished(x, f"{place}.ffn2"), f"{place}.final_layer_norm")
        return x

    def swished(self, x: Tensor, name: str) -> Tensor:
        inner = self.linear(self.norm(x, f"{name}.layer_norm"), f"{name}.w_1")
        return self.linear(inner * inner.sigmoid(), f"{name}.w_2")

    def relative(self, x: Tensor, name: str) -> Tensor:
        size, d = x.shape
        heads = self.a["encoder_attention_heads"]
        width = d // heads
        q, k, v = (self.linear(x, f"{name}.linear_{part}").view(size, heads, width) for part in "qkv")
        y = torch.zeros_like(q)
        for i in range(size):
            place = torch.zeros(size, d, dtype=torch.float64)
            for j in range(size):
                for n in range(0, d, 2):
                    angle = (i - j) * 10_000 ** (-n / d)
                    place[j, n], place[j, n + 1] = math.sin(angle), math.cos(angle)
            p = self.linear(place, f"{name}.linear_pos").view(size, heads, width)
            for h in range(heads):
                content = k[:, h] @ (q[i, h] + self.w[f"{name}.pos_bias_u"][h])
                position = p[:, h] @ (q[i, h] + self.w[f"{name}.pos_bias_v"][h])
                y[i, h] = ((content + position) / math.sqrt(width)).softmax(0) @ v[:, h]
        return self.linear(y.reshape(size, d), f"{name}.linear_out")

    def convolved(self, x: Tensor, name: str) -> Tensor:
        x = self.norm(x, f"{name}.layer_norm")
        left, right = (x @ self.w[f"{name}.pointwise_conv1.weight"][..., 0].T).chunk(2, -1)
        kernel = self.w[f"{name}.depthwise_conv.weight"]
        y = F.conv1d((left * right.sigmoid()).T[None], kernel, padding=kernel.shape[2] // 2, groups=len(kernel))[0].T
        mean, var = (self.w[f"{name}.batch_norm.running_{part}"] for part in ("mean", "var"))
        y = (y - mean) / (var + 1e-5).sqrt() * self.w[f"{name}.batch_norm.weight"] + self.w[f"{name}.batch_norm.bias"]
        return (y * y.sigmoid()) @ self.w[f"{name}.pointwise_conv2.weight"][..., 0].T

    def attend(self, x: Tensor, memory: Tensor, name: str, heads: int) -> Tensor:
        q = self.linear(x, f"{name}.q_proj").view(len(x), heads, -1)
        k, v = (self.linear(memory, f"{name}.{part}_proj").view(len(memory), heads, -1) for part in "kv")
        y = torch.zeros_like(q)
        for h in range(heads):
            y[:, h] = (q[:, h] @ k[:, h].T / math.sqrt(q.shape[2])).softmax(-1) @ v[:, h]
        return self.linear(y.reshape(len(x), -1), f"{name}.out_proj")

    def graph(self, states: Tensor, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the graph from states (S, d). Returns hidden states (L, D), log-probabilities of units (L, V), and
        those of links (L, L). frames: number of feature frames, which sets L."""
        size = min(max(int(self.a["src_upsample_scale"] * frames), 2), self.a["max_target_positions"])
        heads, table = self.a["decoder_attention_heads"], self.w["decoder.embed_tokens.weight"]
        tokens = torch.tensor([0, *[3] * (size - 2), 2])
        rows = torch.arange(2, size + 2)  # fairseq's first position is 2
        x = math.sqrt(table.shape[1]) * table[tokens] + self.w["decoder.embed_positions.weight"][rows]
        for at in range(self.a["decoder_layers"]):
            place = f"decoder.layers.{at}"
            x = self.norm(x + self.attend(x, x, f"{place}.self_attn", heads), f"{place}.self_attn_layer_norm")
            y = self.attend(x, states, f"{place}.encoder_attn", heads)
            x = self.norm(x + y, f"{place}.encoder_attn_layer_norm")
            inner = self.linear(x, f"{place}.fc1")
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            x = self.norm(x + self.linear(inner, f"{place}.fc2"), f"{place}.final_layer_norm")
        both = torch.cat([x, self.w["decoder.link_positional.weight"][rows]], -1)
        q, k = (self.linear(both, f"decoder.{part}_linear").view(size, heads, -1) for part in ("query", "key"))
        gates = self.linear(both, "decoder.gate_linear").softmax(-1)
        links = torch.full((size, size), -math.inf, dtype=torch.float64)
        for i in range(size - 1):
            scores = torch.stack([k[i + 1 :, h] @ q[i, h] for h in range(heads)]) / math.sqrt(q.shape[2])
            links[i, i + 1 :] = (gates[i] @ scores.softmax(-1)).log()
        return x, (x @ self.w["decoder.output_projection.weight"].T).log_softmax(-1), links

    def speak(self, hidden: Tensor) -> Tensor:
        """Compute normalised mels (F, 80) from the hidden states (K, D) of a path without <s>."""
        x = self.linear(self.linear(hidden, "adaptor.fc1").relu(), "adaptor.fc2")
        x = x + self.w["tts.pos_emb_alpha"] * self.positions(len(x))
        x = self.blocks(x, "encoder")
        durations = (self.predict(x, "duration").exp() - 1).round().clamp(min=0).long()
        for name in ("pitch", "energy"):
            bins = torch.linspace(RANGES[f"{name}_min"], RANGES[f"{name}_max"], self.a["var_pred_n_bins"] - 1)
            value = self.predict(x, name)
            x = x + self.w[f"tts.var_adaptor.embed_{name}.weight"][(value[:, None] > bins.double()).sum(1)]
        x = x.repeat_interleave(durations, 0)
        x = self.blocks(x + self.w["tts.dec_pos_emb_alpha"] * self.positions(len(x)), "decoder")
        return self.linear(x, "tts.out_proj")

    def positions(self, size: int) -> Tensor:
        """Compute fairseq's sinusoids (size, width) of the positions 2, 3, ..."""
        half = self.a["tts_encoder_embed_dim"] // 2
        rates = torch.tensor([10_000 ** (-n / (half - 1)) for n in range(half)], dtype=torch.float64)
        angles = torch.arange(2, size + 2, dtype=torch.float64)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], -1)

    def blocks(self, x: Tensor, stack: str) -> Tensor:
        for at in range(self.a[f"tts_{stack}_layers"]):
            place = f"tts.{stack}_fft_layers.{at}"
            y = self.attend(x, x, f"{place}.self_attn", self.a[f"tts_{stack}_attention_heads"])
            x = self.norm(x + y, f"{place}.layer_norm")
            y = self.conv(self.conv(x, f"{place}.ffn.ffn.0").relu(), f"{place}.ffn.ffn.2")
            x = self.norm(x + y, f"{place}.ffn.layer_norm")
        return x

    def predict(self, x: Tensor, name: str) -> Tensor:
        place = f"tts.var_adaptor.{name}_predictor"
        for at in (1, 2):
            x = self.norm(self.conv(x, f"{place}.conv{at}.0").relu(), f"{place}.ln{at}")
        return self.linear(x, f"{place}.proj")[:, 0]
