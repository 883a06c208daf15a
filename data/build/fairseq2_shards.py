"""Read a CVSS-size corpus by fairseq2's data pipeline into mmdec's shards: `make fairseq2` makes the environment.

    .venv-fairseq2/bin/python data/build/fairseq2_shards.py --common-voice data/common_voice/fr --cvss data/cvss_c \\
        --out data/cvss_shards

fairseq2 reads the rows, decodes the clips (libsndfile: flac, wav, ogg, mp3) and computes the filterbanks in parallel,
in order; mmdec says which rows are usable, resamples, trims silence, and writes (mmdec/training/daspeech/corpus.py).
The folder is what `python -m mmdec.training.daspeech.shards` writes, and `ShardedData` trains on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq2.data._memory import MemoryBlock  # type: ignore[import-not-found]
from fairseq2.data.audio import AudioDecoder, WaveformToFbankConverter  # type: ignore[import-not-found]
from fairseq2.data.data_pipeline import read_sequence  # type: ignore[import-not-found]
from torch import Tensor

from mmdec.audio import SAMPLE_RATE, resample, trim_silence
from mmdec.training.corpora.admission import BadRows
from mmdec.training.corpora.cvss import SpeechPair, read_pairs
from mmdec.training.daspeech.corpus import MEGABYTES, write_shards

LEAST = 8  # frames; shorter ones are left out, as by mmdec's own extraction


def features_of(pairs: Sequence[SpeechPair], parallel: int, bad: BadRows) -> Iterator[tuple[SpeechPair, Tensor]]:
    """The pairs with their features (N, 80), in order; those that cannot be read go to `bad`."""

    decode = AudioDecoder(keepdim=True, dtype=torch.float32)
    bank = WaveformToFbankConverter(num_mel_bins=80, waveform_scale=2**15)

    def read(number: int) -> dict[str, Any]:
        samples, reason = torch.zeros(SAMPLE_RATE), ""
        try:
            sound = decode(MemoryBlock(pairs[number].clip.read_bytes()))
            samples = trim_silence(resample(sound["waveform"].mean(1), int(sound["sample_rate"])))
        except (OSError, RuntimeError, ValueError) as error:  # one bad file costs no other
            reason = f"source recording unusable: {type(error).__name__}"
        sound = {"waveform": samples[None], "sample_rate": float(SAMPLE_RATE)}
        return {"number": number, "reason": reason, "sound": sound}

    # what calls Python runs alone: two such calls at the same time stop for ever
    pipeline = read_sequence(list(range(len(pairs)))).map(read)
    for row in pipeline.map(bank, selector="sound", num_parallel_calls=parallel).prefetch(16).and_return():
        pair, features, reason = pairs[int(row["number"])], row["sound"]["fbank"], str(row["reason"])
        spread, mean = torch.std_mean(features, dim=0, correction=0)  # fairseq2's own divides by n - 1
        features = (features - mean) / spread.clamp(min=1e-5)
        if not reason and (len(features) < LEAST or not bool(torch.isfinite(features).all())):
            reason = "too short or not finite"
        if reason:
            bad.add(reason, pair.name)
        else:
            yield pair, features


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--common-voice", type=Path, required=True)
    parser.add_argument("--cvss", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--splits", nargs="+", default=["train", "dev"])
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help="of a shard")
    parser.add_argument("--parallel", type=int, default=2, help="clips that are read at the same time")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for split in given.splits:
        pairs, bad = read_pairs(given.common_voice, given.cvss, split)
        began = time.monotonic()
        count = write_shards(given.out / split, features_of(pairs, given.parallel, bad), given.megabytes)
        seconds = time.monotonic() - began
        print(f"{given.out / split}: {count} rows, {bad.count} left out, {count / seconds:.1f} a second {bad.report()}")


if __name__ == "__main__":
    main()
