"""Tests which pictures of drawn scenes `mmdec bench drafters` describes."""

import json
from pathlib import Path

from recipes.measure.described import main


def test_first_questions_of_pictures_of_different_kinds(tmp_path: Path) -> None:
    kinds = ["menu", "room", "menu", "sign", "tag", "clock", "menu", "street", "menu", "ticket"]
    pictures = [
        {
            "id": number,
            "graph": {"kind": kind},
            "turns": [{"task": "describe"}, {"task": "count"}],
            "conversations": [{"value": value} for value in ("Describe it.", "A picture.", "How many?", "2")],
        }
        for number, kind in enumerate(kinds)
    ]
    (tmp_path / "test.json").write_text(json.dumps(pictures))
    main([str(tmp_path), "--count", "7"])
    chosen = json.loads((tmp_path / "described.json").read_text())
    assert [row["id"] for row in chosen] == [0, 1, 3, 4, 5, 7, 8]  # 2 and 6 are menus with one among the last five
    assert all(row["turns"] == [{"task": "describe"}] for row in chosen)
    assert all(
        [message["value"] for message in row["conversations"]] == ["Describe it.", "A picture."] for row in chosen
    )
