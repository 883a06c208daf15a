"""What is written of a machine holds none of its folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmdec.provenance import CHECKOUT, portable, stamp


@pytest.mark.parametrize(
    ("said", "kept"),
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
    ],
)
def test_paths_of_this_machine_are_left_out(said: object, kept: object) -> None:
    assert portable(said) == kept


def test_a_stamp_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/mmdec/__main__.py", "promote", "--corpus=/home/ada/scenes"])
    assert stamp(None)["argv"] == ["__main__.py", "promote", "--corpus=scenes"]
