"""Make tests/golden/s2t_conformer.*: what fairseq2's own `s2t_conformer` encoder computes, for mmdec to reproduce.

Run once, in an environment of fairseq2's own (Python 3.11; it cannot live beside mmdec's torch). From the repository
root, with `../fs2` for any folder outside it:

    python3 -m venv ../fs2
    ../fs2/bin/pip install -r data/build/fairseq2_golden.requirements.txt
    ../fs2/bin/python data/build/fairseq2_golden.py tests/golden

It writes a small random encoder (relative positions, two blocks) under fairseq2's names, a ragged batch of two inputs
and the encoder's outputs (`s2t_conformer.safetensors`), and the sizes, the versions and fairseq2's own translation of
fairseq's names (`s2t_conformer.json`). The same seed gives the same bytes.
`tests/unit/nn/test_conformer_weights.py` reads them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from importlib.metadata import version
from pathlib import Path

import torch
from fairseq2.models.s2t_conformer import (
    S2TConformerConfig,
    S2TConformerFactory,
    convert_s2t_conformer_state_dict,
)
from fairseq2.models.s2t_transformer.feature_extractor import Conv1dFbankSubsampler
from fairseq2.models.s2t_transformer.frontend import S2TTransformerFrontend
from fairseq2.models.transformer import TransformerEncoder, TransformerFrontend
from fairseq2.nn import BatchLayout, Linear
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SEED = 20231003
SUBSAMPLER_CHANNELS = 24
FAIRSEQ_MODULES = {  # of fairseq's s2t_conformer encoder, with the tensors that each holds
    ("subsample.conv_layers.0", "subsample.conv_layers.1", "linear"): ("weight", "bias"),
    ("self_attn_layer_norm", "conv_module.layer_norm", "final_layer_norm"): ("weight", "bias"),
    ("ffn1.layer_norm", "ffn1.w_1", "ffn1.w_2", "ffn2.layer_norm", "ffn2.w_1", "ffn2.w_2"): ("weight", "bias"),
    ("self_attn.linear_q", "self_attn.linear_k", "self_attn.linear_v", "self_attn.linear_out"): ("weight", "bias"),
    ("self_attn",): ("linear_pos.weight", "pos_bias_u", "pos_bias_v"),
    ("conv_module",): ("pointwise_conv1.weight", "depthwise_conv.weight", "pointwise_conv2.weight"),
    ("conv_module.batch_norm",): ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
}
LENGTHS = (53, 38)  # frames; 14 and 10 after the subsampler, with a remainder at each of its strides


class SmallFactory(S2TConformerFactory):
    """fairseq2's factory with a narrow subsampler: its 1024 channels are written into the code, 1.6 MB of weights."""

    def create_encoder_frontend(self) -> TransformerFrontend:
        config = self._config
        subsampler = Conv1dFbankSubsampler(
            config.num_fbank_channels, SUBSAMPLER_CHANNELS, config.model_dim, kernel_sizes=[5, 5]
        )
        proj = Linear(config.model_dim, config.model_dim, bias=True)
        return S2TTransformerFrontend(config.model_dim, subsampler, None, proj, dropout_p=config.dropout_p)


def small_config() -> S2TConformerConfig:
    return S2TConformerConfig(
        model_dim=16,
        max_source_seq_len=64,
        num_fbank_channels=10,
        use_relative_pos=True,
        num_encoder_layers=2,
        num_encoder_attn_heads=2,
        depthwise_conv_kernel_size=7,
        ffn_inner_dim=32,
    )


def randomise(state: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Every tensor is drawn anew: norms, biases and running statistics must not keep the values that hide a mistake."""
    drawn: dict[str, Tensor] = {}
    for name in sorted(state):
        value = state[name]
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            drawn[name] = torch.tensor(1000 + len(drawn))
        elif name.endswith("running_var"):
            drawn[name] = 0.5 + noise.abs()
        elif name.endswith(("u_bias", "v_bias")):
            drawn[name] = noise  # large, so that a wrong relative shift shows
        elif value.dim() == 1:
            drawn[name] = 0.3 * noise + ("norm.weight" in name)
        else:
            drawn[name] = noise * (value[0].numel() ** -0.5)
    return drawn


def fairseq_names(config: S2TConformerConfig) -> dict[str, str]:
    """fairseq name -> fairseq2 name, by fairseq2's own converter of checkpoints."""
    names: dict[str, object] = {"decoder.embed_tokens.weight": ""}  # by this one the converter knows a fairseq state
    for modules, tensors in FAIRSEQ_MODULES.items():
        for module in modules:
            for tensor in tensors:
                if module.startswith(("subsample", "linear")):
                    places = ["encoder"]
                else:
                    places = [f"encoder.conformer_layers.{i}" for i in range(config.num_encoder_layers)]
                for place in places:
                    names[f"{place}.{module}.{tensor}"] = f"{place}.{module}.{tensor}"
    converted = convert_s2t_conformer_state_dict(names, config)
    return {str(theirs): ours for ours, theirs in sorted(converted.items()) if ours.startswith("encoder")}


def run(frontend: TransformerFrontend, encoder: TransformerEncoder, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs (N_i, 10) -> outputs (B, S, 16), zero beyond each length, and lengths (B,)."""
    # fairseq2 0.8.1's subsampler raises on any padded batch (its guard against packed batches tests `padded`), so each
    # input passes the front end alone; the encoder then takes the ragged batch, its own padding masks at work.
    embedded = []
    for features in inputs:
        seqs, _ = frontend(features[None], BatchLayout.of(features[None]))
        embedded.append(seqs[0])
    lengths = [len(seqs) for seqs in embedded]
    batch = pad_sequence(embedded, batch_first=True)  # (B, S, 16)
    outputs = encoder(batch, BatchLayout.of(batch, lengths))
    alone = [encoder(seqs[None], BatchLayout.of(seqs[None]))[0] for seqs in embedded]
    for row, expected in zip(outputs, alone, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0.0, atol=1e-5)
        row[len(expected) :] = 0.0
    return outputs, torch.tensor(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden file of fairseq2's s2t_conformer encoder.")
    parser.add_argument("directory", type=Path, help="where to write s2t_conformer.safetensors and s2t_conformer.json")
    directory: Path = parser.parse_args().directory
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)

    config = small_config()
    factory = SmallFactory(config)
    model = torch.nn.ModuleDict(
        {"encoder_frontend": factory.create_encoder_frontend(), "encoder": factory.create_conformer_encoder()}
    ).eval()
    model.load_state_dict(randomise(model.state_dict(), generator))
    translated = fairseq_names(config)
    if sorted(translated.values()) != sorted(model.state_dict()):
        raise SystemExit("fairseq2's converter does not give the names of fairseq2's own encoder.")
    inputs = [torch.randn(n, config.num_fbank_channels, generator=generator) for n in LENGTHS]
    with torch.no_grad():
        outputs, output_lengths = run(model["encoder_frontend"], model["encoder"], inputs)

    tensors = {f"weights.{name}": value.contiguous() for name, value in model.state_dict().items()}
    tensors["inputs"] = pad_sequence(inputs, batch_first=True)  # (2, 53, 10)
    tensors["lengths"] = torch.tensor(LENGTHS)
    tensors["outputs"] = outputs.contiguous()  # (2, 14, 16)
    tensors["output_lengths"] = output_lengths
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "s2t_conformer.safetensors")
    record = {
        "made_by": "data/build/fairseq2_golden.py",
        "seed": SEED,
        "versions": {name: version(name) for name in ("fairseq2", "fairseq2n", "torch", "numpy", "safetensors")},
        "subsampler_channels": SUBSAMPLER_CHANNELS,
        "config": dataclasses.asdict(config),
        "fairseq_names": translated,
    }
    (directory / "s2t_conformer.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
