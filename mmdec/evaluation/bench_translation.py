"""Exactness-gated, interleaved timing. Never part of a test: timings are reported with their spread and hardware.

`speech`: the shipped model, through `mmdec.translate_speech`: wav to wav, and the linguistic decoding of each strategy
against the autoregressive baseline's. Beside it, over length, the two decoders by themselves: the length of the
baseline's text is set there, which no public call offers. `paper`: the paper-sized model with random weights against an
S2UT-shaped decoder: timing only. Both sides of a ratio run in turn, A B A B, and the median of the paired ratios is
given. The gates, before any timing: verified units are the baseline's; a baseline's cached decoding gives the units of
its full pass, and beam search with one beam those of greedy.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdec import audio
from mmdec.checks.arguments import check_threads
from mmdec.evaluation.pairing import paired
from mmdec.hub import DEFAULT_MODEL
from mmdec.nn.ar_decoder import ArConfig, ArDecoder
from mmdec.nn.dag_decoder import BOS, EOS
from mmdec.nn.daspeech import DASpeech, DASpeechConfig
from mmdec.ops.dag_decode import LatticePath, decode_lattice
from mmdec.pipelines.translation.load import load
from mmdec.pipelines.translation.translate import Translation, translate_speech
from mmdec.pipelines.translation.translator import SpeechTranslator
from mmdec.provenance import hardware
from mmdec.runtime import Stopwatch, check_device, dtype_of
from mmdec.types import InputError, MmdecError

UNITS_A_SECOND = 10.0  # phones of English for a second of French, as in the phrasebook
S2UT_UNITS_A_SECOND = 25.0
S2UT = ArConfig(d_model=512, ffn=2048, heads=8, layers=6)
S2UT_VOCABULARY = 1004
GATE_UNITS = 40
GATE_SLACK = 1e-3  # of a logit: cached and full pass round differently, and two units may be as good as equal


def bench_speech(
    recordings: Sequence[Path],
    model: str = DEFAULT_MODEL,
    seconds: Sequence[float] = (1.5, 3, 6, 10, 20),
    repeats: int = 15,
    device: str = "cpu",
    threads: int = 2,
) -> dict[str, Any]:
    """The shipped model: linguistic decoding over length, and `mmdec.translate_speech` on `recordings`.

    Over length, recordings are joined end to end, and the baseline decodes `UNITS_A_SECOND` units for each second, end
    or not, so that its length is known; the graph's size follows from the frames. Wav to wav begins with the path of
    the file: reading it, features, all networks and words are in the time. What the strategies are compared by are the
    seconds of linguistic decoding that the call returns.
    """
    if not recordings:
        raise InputError("`recordings` must name at least one sound file, but is empty. Try data/samples/*.wav.")
    check_threads(threads)
    check_device(device)
    torch.set_num_threads(threads)
    translator = load(model, device)
    network, place = translator.model, translator.device
    sounds = [audio.load_audio(path) for path in recordings]
    with torch.inference_mode():
        states, sizes, _ = _encoded(network, sounds[:1], len(sounds[0]) / audio.SAMPLE_RATE, place)
        gate(network.ar, states, sizes)
        curve = []
        for length in seconds:
            states, sizes, frames = _encoded(network, sounds, length, place)
            count = round(length * UNITS_A_SECOND)

            def graph(states: Tensor = states, sizes: Tensor = sizes, frames: Tensor = frames) -> LatticePath:
                lattice = network.lattice(states, sizes, frames)
                return decode_lattice(lattice.emissions, lattice.links, lattice.lengths, "lookahead")

            def baseline(states: Tensor = states, sizes: Tensor = sizes, count: int = count) -> list[list[int]]:
                return network.ar.generate(states, sizes, count, min_length=count)

            result = paired(graph, baseline, repeats, place)
            vertices = int(network.lattice(states, sizes, frames).lengths[0])
            curve.append(
                {"seconds": length, "vertices": vertices, "units": count, "passes": count + 1, **asdict(result)}
            )
    verified = [_against_baseline(path, translator, "verified", repeats) for path in recordings]
    lookahead = [_against_baseline(path, translator, "lookahead", repeats) for path in recordings]
    rates = []
    for path in recordings:
        translate_speech(path, model=translator)
        for _ in range(3):
            stopwatch = Stopwatch(place)
            length = translate_speech(path, model=translator).seconds_source
            rates.append(stopwatch.lap() / length)
    return {
        "what": "shipped model; a = graph, lookahead; b = autoregressive baseline, greedy; after the encoder",
        "curve": curve,
        "graph": {
            "what": "whole recordings, linguistic seconds of translate_speech; a = lookahead; b = autoregressive",
            "recordings": lookahead,
            "median_ratio": statistics.median(row["ratio"] for row in lookahead),
        },
        "verified": {
            "what": "whole recordings, linguistic seconds of translate_speech; a = verified; b = autoregressive",
            "recordings": verified,
            "median_ratio": statistics.median(row["ratio"] for row in verified),
            "units_per_pass": sum(row["units"] for row in verified) / sum(row["passes"] for row in verified),
        },
        "wav_to_wav_per_second": {
            "what": "seconds from the file's path to English samples, reading included, for a second of source",
            "median": statistics.median(rates),
            "worst": max(rates),
            "n": len(rates),
        },
        "hardware": hardware(device=place, dtype=dtype_of(network), batch=1, threads=threads),
    }


def _against_baseline(path: Path, translator: SpeechTranslator, strategy: str, repeats: int) -> dict[str, Any]:
    """One recording by a strategy and by plain autoregressive decoding, </s> found by both. The gate: verified units
    are the baseline's."""

    def ours() -> Translation:
        return translate_speech(path, model=translator, strategy=strategy)

    def baseline() -> Translation:
        return translate_speech(path, model=translator, strategy="autoregressive")

    first, plain = ours(), baseline()
    if strategy == "verified" and first.units != plain.units:
        raise MmdecError("Verified units are not the baseline's: no timing is reported. Report this as a bug.")
    result = paired(ours, baseline, repeats, translator.device, lambda one: one.timings["linguistic"])
    # The baseline takes one pass for each unit, </s> included.
    return {"seconds": plain.seconds_source, "units": plain.passes, "passes": first.passes, **asdict(result)}


def bench_paper(
    seconds: Sequence[float] = (3, 6, 12, 20), repeats: int = 5, device: str = "cpu", threads: int = 2, beams: int = 10
) -> dict[str, Any]:
    """Paper-sized DASpeech against an S2UT-shaped decoder, both with random weights: timing only.

    a: the graph decoder, lookahead, adaptor and FastSpeech 2 with `UNITS_A_SECOND` phones of equal duration.
    b: 6 layers of width 512 over 1000 units, 25 a second, greedy and with beams. Encoder and vocoder are on neither
    side; the states have the paper's shape.
    """
    check_threads(threads)
    check_device(device)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    place = torch.device(device)
    config = DASpeechConfig.paper()
    network = DASpeech(config, 76).eval().to(place)
    s2ut = ArDecoder(S2UT, S2UT_VOCABULARY, config.encoder.d_model).eval().to(place)
    rows = []
    with torch.inference_mode():
        memory = torch.randn(1, 75, config.encoder.d_model, device=place)  # of 3 seconds
        gate(s2ut, memory, torch.tensor([75], device=place), GATE_UNITS)
        for length in seconds:
            frames = torch.tensor([round(100 * length)], device=place)
            sizes = (frames + 3) // 4
            states = torch.randn(1, int(sizes[0]), config.encoder.d_model, device=place)
            phones, units = round(length * UNITS_A_SECOND), round(length * S2UT_UNITS_A_SECOND)
            mel_frames = round(length * audio.SAMPLE_RATE / audio.HOP)
            durations = torch.full((1, phones), mel_frames // phones, device=place)

            def parallel(
                states: Tensor = states,
                sizes: Tensor = sizes,
                frames: Tensor = frames,
                phones: int = phones,
                durations: Tensor = durations,
            ) -> Tensor:
                lattice = network.lattice(states, sizes, frames)
                decode_lattice(lattice.emissions, lattice.links, lattice.lengths, "lookahead")
                hidden = lattice.hidden[:, :phones]
                count = torch.tensor([phones], device=states.device)
                return network.tts(network.acoustic_input(hidden), count, durations).mel

            def greedy(states: Tensor = states, sizes: Tensor = sizes, units: int = units) -> list[list[int]]:
                return s2ut.generate(states, sizes, units, min_length=units)

            def beam(states: Tensor = states, sizes: Tensor = sizes, units: int = units) -> list[int]:
                return s2ut.beam_search(states, sizes, beams, units, min_length=units)

            rows.append(
                {
                    "seconds": length,
                    "greedy": asdict(paired(parallel, greedy, repeats, place)),
                    f"beam {beams}": asdict(paired(parallel, beam, repeats, place)),
                }
            )
    return {
        "what": "paper-sized, random weights, timing only; a = DAG and acoustic decoding; b = S2UT-shaped decoder",
        "curve": rows,
        "hardware": hardware(device=place, dtype=dtype_of(network), batch=1, threads=threads),
    }


def _encoded(network: DASpeech, sounds: Sequence[Tensor], seconds: float, place: torch.device) -> tuple[Tensor, ...]:
    """Encoder states of so many seconds of joined recordings, their number, and the frames."""
    wanted = round(seconds * audio.SAMPLE_RATE)
    joined = torch.cat(list(sounds))
    joined = joined.repeat(-(-wanted // len(joined)))[:wanted]
    features = audio.fbank(joined)[None].to(place)
    frames = torch.tensor([features.shape[1]], device=place)
    states, sizes = network.encode(features, frames)
    return states, sizes, frames


def gate(decoder: ArDecoder, states: Tensor, sizes: Tensor, min_length: int = 0) -> None:
    """No timing of a baseline that is wrong: one row of states (1, S, d). MmdecError says what disagrees."""
    found = decoder.generate(states, sizes, GATE_UNITS, min_length)[0]
    tokens = torch.tensor([[BOS, *found]], device=states.device)
    logits = decoder(tokens, states, sizes)[0]  # (M + 1, V)
    logits[:min_length, EOS] = -torch.inf
    ended = [EOS] if len(found) < GATE_UNITS else []
    said = torch.tensor([*found, *ended], device=states.device)
    best = logits[: len(said)].max(-1).values
    if not bool((logits[: len(said)].gather(1, said[:, None])[:, 0] >= best - GATE_SLACK).all()):
        raise MmdecError(
            "The cached decoder disagrees with its full pass: no timing is reported. Report this as a bug."
        )
    if min_length == GATE_UNITS and decoder.beam_search(states, sizes, 1, GATE_UNITS, min_length) != found:
        raise MmdecError("Beam search with one beam is not greedy: no timing is reported. Report this as a bug.")
