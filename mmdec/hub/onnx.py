"""Writes a translator's encoder and graph decoder as ONNX files, for engines without Python (extra `mmdec[onnx]`).

encoder.onnx computes logits of French pieces from the features of one recording. `best_pieces` or `read_pieces` makes a
transcript from these logits: pieces and weights at each position. From the transcript, graph.onnx computes a graph of
English pieces. `decode_lattice` finds a path in this graph. Both files accept one row of any length, without padding.

The modules here repeat the forward passes of the speech encoder, `CtcHead`, `PieceReader` and `DagDecoder` for one row,
with the same layers. They take every size from the shape of an input, because Python numbers would become constants in
the exported file.
"""

from __future__ import annotations

import math
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.hub.daspeech import heard_parts
from mmdec.hub.provenance import stamp
from mmdec.hub.publish import new_folder, whole_folder
from mmdec.hub.translator_files import write_json
from mmdec.nn.dag_decoder import BOS, EOS, UNK, DagDecoder
from mmdec.nn.heard_translator import HeardTranslator
from mmdec.types import InputError

ENCODER, GRAPH = "encoder.onnx", "graph.onnx"
NEEDED = ("onnx", "onnxscript")


@final
class EncoderForExport(nn.Module):
    """Speech encoder and CTC head for one recording.

    forward: features (1, mels, F); count (1,), number of encoder states that belong to the recording. Returns: logits
        (1, N, V) of French pieces. Only the first ceil(count / stride) of the N rows of logits belong to the recording.
    """

    def __init__(self, model: HeardTranslator) -> None:
        super().__init__()
        self.encoder, self.head = model.encoder, model.head

    def forward(self, features: Tensor, count: Tensor) -> Tensor:
        x = F.gelu(self.encoder.conv2(F.gelu(self.encoder.conv1(features)))).transpose(1, 2)
        x = x + self.encoder.embed_positions.weight[: x.shape[1]]
        for layer in self.encoder.layers:
            x = layer(x, None)
        logits, _ = self.head(self.encoder.layer_norm(x), count)
        return logits


@final
class GraphForExport(nn.Module):
    """Piece reader and graph decoder for one transcript.

    forward: pieces (1, N, K), the ids of K pieces at each of N positions; weights (1, N, K) of these pieces; vertices
        (L,), the numbers 0 ... L - 1. Returns: the graph: log-probabilities of English pieces (1, L, V),
        log-probabilities of links (1, L from, L to), hidden states (1, L, D).
    """

    def __init__(self, model: HeardTranslator) -> None:
        super().__init__()
        if model.reader.project is not None or not isinstance(model.decoder, DagDecoder):
            raise InputError("`model` must have a graph that reads pieces alone, but has none. Export another.")
        self.reader, self.decoder = model.reader, model.decoder
        config = self.decoder.config
        if config.positions != "sinusoidal" or self.decoder.copy is None:
            raise InputError("`model` must have a graph with sinusoids that copies states, but has none. Use another.")
        self.copy = self.decoder.copy

    def forward(self, pieces: Tensor, weights: Tensor, vertices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = self.reader.config.d_model
        x = (self.reader.embed_pieces(pieces) * weights[..., None]).sum(2) * math.sqrt(d)
        places = torch.arange(pieces.shape[1], device=pieces.device)
        x = x + _sinusoids(places, d)
        for layer in self.reader.layers:
            x = layer(x, None)
        states = self.reader.norm(x)
        hidden = self._inputs(states, vertices)
        for layer in self.decoder.layers:
            hidden = layer(hidden, None, states, None)
        emissions = F.linear(hidden, self.decoder.embed_tokens.weight).log_softmax(-1)
        return emissions, self._links(hidden, vertices), hidden

    def _inputs(self, states: Tensor, vertices: Tensor) -> Tensor:
        d, last = self.decoder.config.d_model, vertices[-1]
        tokens = torch.where(vertices == last, EOS, torch.where(vertices == 0, BOS, UNK))
        x = math.sqrt(d) * self.decoder.embed_tokens(tokens) + _sinusoids(vertices, d)
        # the index of the last state is computed from a tensor, because a Python number would become a constant in the
        # file
        end = torch.ones_like(states[0, :, 0]).sum() - 1
        point = torch.minimum(vertices * (end / last.clamp(min=1)), end)
        low = point.floor()
        copied = self.copy(states)[0]
        before, after = (copied.index_select(0, at.long()) for at in (low, torch.minimum(low + 1, end)))
        return (x + torch.lerp(before, after, (point - low)[:, None]))[None]

    def _links(self, hidden: Tensor, vertices: Tensor) -> Tensor:
        links, config = self.decoder.links, self.decoder.config
        position = _sinusoids(vertices, config.d_model)
        x = torch.cat([hidden, position[None]], dim=-1)
        q, k = (
            project(x).unflatten(-1, (config.link_heads, config.link_dim)).transpose(1, 2)
            for project in (links.query_linear, links.key_linear)
        )
        jump = vertices[None, :] - vertices[:, None]
        scores = q @ k.transpose(2, 3) * config.link_dim**-0.5  # shape (1, H, L, L)
        if links.prior is not None:
            scores = scores - F.softplus(links.prior)[:, None, None] * jump
        chances = scores.masked_fill(jump <= 0, -1e30).softmax(-1)
        gates = links.gate_linear(x).softmax(-1).transpose(1, 2)[..., None]  # shape (1, H, L, 1)
        return (chances * gates).sum(1).masked_fill(jump <= 0, 0.0).log()


def export_onnx(model: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Write encoder.onnx, graph.onnx, and onnx.json with the sizes that a caller needs. Returns: `directory`.

    model: a translator of word pieces, by name or folder. directory: new or empty.
    Raises: InputError for another model, or without the extra `mmdec[onnx]`.
    """
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        raise InputError(f"`export onnx` must have {absent[0]}, which is not installed. pip install 'mmdec[onnx]'.")
    target, network = new_folder(directory), heard_parts(model).model.eval()
    encoder, graph = EncoderForExport(network), GraphForExport(network)
    config = network.sizes
    dim = torch.export.Dim
    features = torch.zeros(1, config.encoder.mels, 200)
    pieces, weights = torch.ones(1, 7, config.best, dtype=torch.long), torch.full((1, 7, config.best), 1 / config.best)
    with whole_folder(target) as fresh:
        _write(
            encoder,
            (features, torch.tensor([90])),
            fresh / ENCODER,
            {"features": {2: dim("frames", min=8, max=2 * config.encoder.positions)}, "count": None},
            ["logits"],
        )
        places = dim("places", min=1)
        _write(
            graph,
            (pieces, weights, torch.arange(28)),
            fresh / GRAPH,
            {"pieces": {1: places}, "weights": {1: places}, "vertices": {0: dim("vertices", min=2)}},
            ["emissions", "links", "hidden"],
        )
        dag = graph.decoder.config
        sizes = {"upsample": dag.upsample, "min_vertices": dag.min_vertices, "max_vertices": dag.max_vertices}
        sizes |= {"stride": config.head.stride, "best": config.best}
        write_json(fresh / "onnx.json", {**sizes, **stamp(torch.device("cpu"))})
    return target


def _write(
    module: nn.Module, inputs: tuple[Tensor, ...], path: Path, shapes: dict[str, object], outputs: list[str]
) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own code, which the caller cannot change
        torch.onnx.export(
            module.eval(),
            inputs,
            path,
            input_names=list(shapes),
            output_names=outputs,
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )


def _sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """Compute sinusoidal embeddings (N, d_model) of the positions (N,)."""
    half = d_model // 2
    rate = torch.exp(torch.arange(half, dtype=torch.float32, device=positions.device) * (-math.log(1e4) / half))
    angles = positions[:, None] * rate
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
