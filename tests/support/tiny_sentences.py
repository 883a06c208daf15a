"""A corpus of ten recordings (noise) with sentences as their texts, and a Whisper with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from mmdec.io.audio import save_audio
from tests.support.tiny_whisper import build

TEXTS = ["Où est la gare ?", "La gare est là.", "Vous êtes là ?", "Où êtes-vous ?", "L'été est là !"] * 2
SIZES = {"d_states": 32, "d_model": 16, "layers": 1, "kernel": 5, "dropout": 0.0}  # of a CTC head


def write(root: Path) -> Path:
    """Write whisper/, manifest.tsv with clips/ (eight of train, two of dev), and text/train.tsv into `root`."""
    build(80, 1, 2, 0, init_std=0.2, max_source_positions=500).save_pretrained(root / "whisper")
    lines = ["id\tpath\tsplit\tspeaker\ttext"]
    for number, text in enumerate(TEXTS):
        draw = torch.Generator().manual_seed(number)
        save_audio(root / "clips" / f"{number}.wav", 0.1 * torch.randn(4000 + 400 * number, generator=draw))
        lines.append(f"{number}\tclips/{number}.wav\t{'dev' if number > 7 else 'train'}\tx\t{text}")
    (root / "manifest.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (root / "text").mkdir()
    rows = "".join(f"{n}\tg\t{text}\tEnglish.\n" for n, text in enumerate(TEXTS))
    (root / "text" / "train.tsv").write_text(rows, encoding="utf-8")
    return root


def write_pairs(root: Path) -> Path:
    """Write sentence pairs first/{train,dev}.tsv and second/{train,dev}.tsv: 8 and 80 French training sentences, some
    with two translations."""
    nouns = {"gare": "station", "porte": "entry_point", "ville": "town", "plage": "beach"}
    frames = (("Où est la {} ?", "Where is the {}?"), ("La {} est là.", "The {} is there."))
    for name, times in (("first", 1), ("second", 10)):
        rows = []
        for turn in range(times):
            for noun, english in nouns.items():
                for french, translation in frames:
                    sentence = f"{french.format(noun)} {'Oui. ' * (turn % 3)}".strip()
                    written = f"{translation.format(english)} {'Yes. ' * (turn % 3)}".strip()
                    rows.append([sentence, written] + (["Over there."] if turn % 2 else []))
        (root / name).mkdir()
        lines = ["\t".join([str(number), str(number), *row]) + "\n" for number, row in enumerate(rows)]
        (root / name / "train.tsv").write_text("".join(lines), encoding="utf-8")
        parts = [line.rstrip("\n").split("\t") for line in lines[:8]]
        others = [f"{a}\t{b}\t{french} Oui. Oui. Oui.\t{english} Yes. Yes. Yes.\n" for a, b, french, english in parts]
        (root / name / "dev.tsv").write_text("".join(others), encoding="utf-8")
    return root
