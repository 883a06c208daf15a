"""A tiny speech translator with a Whisper's encoder, CTC head, reader, both decoders and a voice; random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from mmdec.daspeech.acoustic import FastSpeech2Config
from mmdec.daspeech.ar_decoder import ArConfig
from mmdec.daspeech.checkpoint_files import DecodingSettings
from mmdec.daspeech.dag_decoder import DagConfig
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts, save_piece_translator
from mmdec.daspeech.piece_reader import ReaderConfig
from mmdec.daspeech.piece_translator import PhoneVoice, PieceTranslator, PieceTranslatorConfig
from mmdec.drafters.ctc.network import CtcHeadConfig
from mmdec.phonetics.pieces import CTC_SPECIAL_PIECES, DECODER_SPECIAL_PIECES, PieceTokenizer
from mmdec.phonetics.spelling import Speller
from mmdec.whisper.unpadded_encoder import UnpaddedEncoderConfig, sinusoid_positions
from tests.support.tiny_translator import LEXICON, UNITS, tiny_vocoder

FRENCH = ["où est la gare ?", "la gare est là", "vous êtes là ?", "bonjour madame", "l'été est là"]
ENGLISH = ["Hello there.", "Hello, low there?", "There, there!", "Low, low there.", "Hello, hello!"]
PHONES = tuple(UNITS)
LAYER = {"d_model": 16, "ffn": 16, "heads": 2, "layers": 1}


def tables() -> tuple[PieceTokenizer, PieceTokenizer]:
    """Learn the piece tables: French for the CTC head, English for the decoders."""
    return PieceTokenizer.learn(FRENCH, 40, CTC_SPECIAL_PIECES), PieceTokenizer.learn(
        ENGLISH, 40, DECODER_SPECIAL_PIECES
    )


def sizes(pieces: int, units: int, graph: bool = True, d_states: int = 0) -> PieceTranslatorConfig:
    links = {"link_heads": 2, "link_dim": 8, "positions": "sinusoidal", "link_prior": True, "copy_encoder": True}
    return PieceTranslatorConfig(
        encoder=UnpaddedEncoderConfig(d_model=32, layers=1, heads=2, ffn=32, positions=500),
        head=CtcHeadConfig(d_states=32, pieces=pieces, d_model=32, layers=1, kernel=5),
        reader=ReaderConfig(
            pieces=pieces, units=units, **LAYER, d_states=d_states, ar=ArConfig(**LAYER),
            dag=DagConfig(**LAYER, upsample=4.0, min_vertices=24, **links) if graph else None,  # type: ignore[arg-type]
        ),
        best=4,
    )  # fmt: skip


def network(seed: int = 0, graph: bool = True, d_states: int = 0) -> PieceTranslator:
    """Build a network with random weights whose head outputs several pieces and whose decoders output no special
    ones."""
    pieces, english = tables()
    torch.manual_seed(seed)
    model = PieceTranslator(sizes(len(pieces), len(english), graph, d_states)).eval()
    with torch.no_grad():
        model.encoder.embed_positions.weight.copy_(sinusoid_positions(model.sizes.encoder))
        model.head.output.weight *= 12.0
        for decoder in (model.ar, model.decoder):
            if decoder is not None:
                decoder.embed_tokens.weight[:4] *= 0.3
                # else each unit would be its own likeliest successor, and all units would be equal
                decoder.layers[-1].final_layer_norm.weight.normal_(std=2.0)
    return model


def parts(seed: int = 0, graph: bool = True, pronunciation: Path | None = None) -> PieceTranslatorParts:
    """Build a whole translator. pronunciation: where to write the speller's file."""
    assert pronunciation is not None
    lines = [f"{word}\t{' '.join(phones)}" for word, variants in LEXICON.items() for phones in variants]
    pronunciation.write_text("\n".join([*lines, "(h)\thh", "(e)\teh", "(l)\tl", "(o)\tow", "(t)\tdh"]) + "\n")
    pieces, english = tables()
    torch.manual_seed(seed)
    voice = PhoneVoice(
        FastSpeech2Config(
            d_model=16, ffn=16, heads=2, encoder_layers=1, decoder_layers=1, predictor=8, kernels=(3, 1), bins=16
        ),
        len(PHONES),
    )
    with torch.no_grad():  # so that each phone lasts some frames
        voice.tts.duration.out.weight *= 0.1
        voice.tts.duration.out.bias.fill_(1.6)
    return PieceTranslatorParts(
        network(seed, graph), voice.eval(), tiny_vocoder().eval(), pieces, english, PHONES,
        Speller.read(pronunciation), pronunciation,
        DecodingSettings("lookahead" if graph else "autoregressive", collapse=True), "tiny",
    )  # fmt: skip


def write(directory: Path, seed: int = 0, graph: bool = True) -> Path:
    """Write a translator's folder, which `mmdec.load` can load."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    return save_piece_translator(directory, parts(seed, graph, directory.with_name(f"{directory.name}.tsv")))
