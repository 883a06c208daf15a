"""Compares a translator's encoder and graph in ONNX with the networks that they were exported from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdec import audio
from mmdec.hub.daspeech import heard_parts
from mmdec.hub.onnx import ENCODER, GRAPH, export_onnx
from mmdec.nn.ctc_head import best_pieces
from mmdec.nn.dag_decoder import graph_sizes
from mmdec.types import InputError

pytest.importorskip("onnxscript")
runtime: Any = pytest.importorskip("onnxruntime")

MODEL = "daspeech-everyday"
SAMPLE = Path("data/samples/rendez_vous_aujourd_hui.wav")
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_onnx(MODEL, tmp_path_factory.mktemp("onnx") / "out")


def session(path: Path) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(opened: Any, **inputs: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.from_numpy(np.asarray(value)) for value in opened.run(None, {k: v.numpy() for k, v in inputs.items()})
    ]


@torch.inference_mode()
def test_a_recording_of_any_length_gives_the_networks_numbers(folder: Path):
    model = heard_parts(MODEL).model.eval()
    encoder, graph = session(folder / ENCODER), session(folder / GRAPH)
    sound = audio.load_audio(SAMPLE)
    lengths = [len(sound) // 3, len(sound), 3 * len(sound)]
    for size in lengths:
        piece = sound.repeat(3)[:size]
        features, frames, counts = model.features([piece])
        (logits,) = run(encoder, features=features, count=counts)
        states, _ = model.encoder(features, frames)
        expected, number = model.head(states[:, : int(counts)], counts)
        torch.testing.assert_close(logits[:, : int(number)], expected, **CLOSE)
        heard = best_pieces(expected, number, model.sizes.best)
        read = model.reader(heard.pieces, heard.weights, heard.lengths)
        lattice = model.lattice(read, heard.lengths, heard.lengths)
        assert model.decoder is not None
        vertices = torch.arange(int(graph_sizes(model.decoder.config, heard.lengths)))
        emissions, links, hidden = run(graph, pieces=heard.pieces, weights=heard.weights, vertices=vertices)
        torch.testing.assert_close(emissions.exp(), lattice.emissions.exp(), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(hidden, lattice.hidden, **CLOSE)
        torch.testing.assert_close(links.exp(), lattice.links.exp(), **CLOSE)
        assert torch.equal(links.isinf().all(-1), lattice.links.isinf().all(-1))
    assert len(set(lengths)) == 3


def test_an_existing_folder_stays(folder: Path):
    with pytest.raises(InputError, match="new or empty"):
        export_onnx(MODEL, folder)
