"""Tests that a provenance does not contain folder names of the machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from mmdec.hub.provenance import CHECKOUT, command_record, portable
from mmdec.hub.publish import PROVENANCE, write_provenance


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/home/ada/runs/vlm-scenes", "vlm-scenes"),
        ("--corpus=/home/ada/scenes", "--corpus=scenes"),
        (str(CHECKOUT / "runs" / "a"), "runs/a"),
        (Path("/home/ada/scenes"), "scenes"),
        ("'/home/ada/a/7.png' is no picture", "'7.png' is no picture"),
        ("cannot open /home/ada/7.png.", "cannot open 7.png."),
        ("models/vlm-scenes/eagle", "models/vlm-scenes/eagle"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("1/2/3 or 09:30", "1/2/3 or 09:30"),
        ("AC/DC: /ˈbɪəz/", "AC/DC: /ˈbɪəz/"),
        ({"start": ["/home/ada/models/a", 3, None]}, {"start": ["a", 3, None]}),
        ("file:///home/ada/a/7.png", "7.png"),
        ("cannot open file:///home/ada/7.png, nor file:/home/ada/8.png", "cannot open 7.png, nor 8.png"),
        ("file://localhost/home/ada/7%20b.png", "7%20b.png"),
        ("error:/home/ada/7.png", "error:7.png"),
        ("x:/home/ada/7.png", "7.png"),
        ("cannot open C:\\Users\\Ada\\7.png now", "cannot open 7.png now"),
        ("\\\\server\\ada\\7.png", "7.png"),
        ("-o/home/ada/runs", "-oruns"),
        ('["/home/ada/a.tsv","/home/ada/b.tsv"]', '["a.tsv","b.tsv"]'),
        ("~ada/runs/a in ~/runs/b", "a in b"),
        ("--corpus=/home/ada lovelace/my scenes", "--corpus=my scenes"),
        ("/home/o'brien/runs/a", "a"),
        ({"/home/ada/x.wav": 1, "a": {Path("/home/ada/y"): 2}, 3: 4}, {"x.wav": 1, "a": {"y": 2}, 3: 4}),
        ({"https://example.org/a/b": 1}, {"https://example.org/a/b": 1}),
        ("see s3://bucket/a/b, not /home/ada/x", "see s3://bucket/a/b, not x"),
        ("a\nb: 3\n", "a\nb: 3\n"),
        ("say /s/, /z/ and /t/ here", "say /s/, /z/ and /t/ here"),
        ("tokens/s: 3, and/or 5", "tokens/s: 3, and/or 5"),
        ("<b>1</b> of </speak>", "<b>1</b> of </speak>"),
        (str(CHECKOUT / "my runs" / "a"), "my runs/a"),
        (f"cannot open {CHECKOUT}/my runs/a", "cannot open my runs/a"),
    ],
)
def test_paths_of_this_machine_are_left_out(value: object, expected: object) -> None:
    assert portable(value) == expected


def test_a_stamp_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/mmdec/__main__.py", "eval", "--corpus=/home/ada/scenes"])
    assert command_record(None)["argv"] == ["__main__.py", "eval", "--corpus=scenes"]


def test_provenance_of_training_names_no_folder(tmp_path: Path) -> None:
    training = {"hyperparameters": {"corpus": Path("/home/ada lovelace/scenes"), "/home/ada/a.ckpt": "--a=/home/ada/b"}}
    write_provenance(tmp_path, training, torch.device("cpu"))
    written = json.loads((tmp_path / PROVENANCE).read_text(encoding="utf-8"))
    assert written["training"] == {"hyperparameters": {"corpus": "scenes", "a.ckpt": "--a=b"}}
