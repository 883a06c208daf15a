"""TextGrids of the Montreal Forced Aligner become the table that training reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmdec.training.corpora.cvss import read_pairs
from tests.support.tiny_corpus import read_table, write_corpus, write_table

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import mfa_alignment as mfa

INTERVALS = [("", 0.0, 0.21), ("DH", 0.21, 0.3), ("AH0", 0.3, 0.355), ("spn", 0.355, 0.5), ("sil", 0.5, 0.8)]


def long_format(intervals: list[tuple[str, float, float]], tier: str = "phones") -> str:
    end = intervals[-1][2]
    lines = [
        'File type = "ooTextFile"\nObject class = "TextGrid"\n',
        f"xmin = 0 \nxmax = {end} \ntiers? <exists> \nsize = 2 \nitem []: ",
        '    item [1]:\n        class = "IntervalTier" \n        name = "words" ',
        f"        xmin = 0 \n        xmax = {end} ",
        "        intervals: size = 1 \n        intervals [1]:\n            xmin = 0 ",
        f'            xmax = {end} \n            text = "the ""3 = 4"" item [2]" ',
        f'    item [2]:\n        class = "IntervalTier" \n        name = "{tier}" ',
        f"        xmin = 0 \n        xmax = {end} ",
        f"        intervals: size = {len(intervals)} ",
    ]
    for number, (label, start, stop) in enumerate(intervals, start=1):
        lines.append(f"        intervals [{number}]:\n            xmin = {start} \n            xmax = {stop} ")
        lines.append(f'            text = "{label}" ')
    return "\n".join(lines) + "\n"


def short_format(intervals: list[tuple[str, float, float]]) -> str:
    end = intervals[-1][2]
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "0", str(end), "<exists>", "2"]
    lines += ['"TextTier"', '"marks"', "0", str(end), "1", "0.1", '"a mark"']
    lines += ['"IntervalTier"', '"phones"', "0", str(end), str(len(intervals))]
    for label, start, stop in intervals:
        lines += [str(start), str(stop), f'"{label}"']
    return "\n".join(lines) + "\n"


def test_both_formats_say_the_same():
    assert mfa.read_textgrid(long_format(INTERVALS)) == INTERVALS
    assert mfa.read_textgrid(short_format(INTERVALS)) == INTERVALS
    assert mfa.alignment(INTERVALS) == "pau:0.21 DH:0.3 AH0:0.355 spn:0.5 pau:0.8"


def test_silences_become_one_pause_and_gaps_are_silence():
    intervals = [("sp", 0.0, 0.1), ("SIL", 0.1, 0.2), ("AA1", 0.2, 0.3), ("B", 0.45, 0.5), ("", 0.5, 0.6)]
    assert mfa.alignment(intervals) == "pau:0.2 AA1:0.3 pau:0.45 B:0.5 pau:0.6"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "not a TextGrid"),
        (short_format(INTERVALS)[:-20], "cut short"),
        (long_format(INTERVALS, tier="syllables"), "no tier 'phones'"),
        (short_format(INTERVALS).replace("0.355\n0.5", '"x"\n0.5'), "damaged"),
        (short_format([("", 0.0, 0.4), ("sp", 0.4, 0.9)]), "silence alone"),
        (short_format([("A", 0.0, 0.4), ("B", 0.2, 0.9)]), "times that do not rise"),
        (short_format([("A", 0.4, 0.4), ("B", 0.4, 0.9)]), "times that do not rise"),
        (short_format([("A B", 0.0, 0.4)]), "a phone with a space"),
    ],
)
def test_a_bad_file_is_counted_and_named(text: str, reason: str, tmp_path: Path):
    (tmp_path / "common_voice_fr_7.mp3.TextGrid").write_text(text, encoding="utf-8")
    rows, bad = mfa.convert(tmp_path)
    assert rows == []
    assert bad == {reason: ["common_voice_fr_7.mp3"]}


def test_a_folder_becomes_a_table_that_training_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    corpus = write_corpus(tmp_path / "corpus", recordings=1, dev=1)
    rows, _ = read_pairs(corpus.common_voice, corpus.cvss, "train")
    grids = tmp_path / "textgrids" / "speaker"
    grids.mkdir(parents=True)
    for number, row in enumerate(rows):
        starts = [0.0, *(end for _, end in row.alignment)]
        intervals = [
            ("" if phone == "pau" else phone, start, end)
            for (phone, end), start in zip(row.alignment, starts, strict=False)
        ]
        text = (long_format if number % 2 else short_format)(intervals)
        name = row.name if number != 2 else row.name.removesuffix(".mp3")
        (grids / f"{name}.TextGrid").write_text(text, encoding="utf-16" if number == 3 else "utf-8")
    (grids / "common_voice_fr_99.mp3.TextGrid").write_bytes(b"\xff\x00broken")
    table = corpus.cvss / "train.alignment.tsv"
    table.unlink()
    assert mfa.main([str(tmp_path / "textgrids"), str(table)]) == 0
    out, err = capsys.readouterr()
    assert "4 alignments" in out
    assert err == "cannot be read: 1 (common_voice_fr_99.mp3)\n"
    again, bad = read_pairs(corpus.common_voice, corpus.cvss, "train")
    assert bad.count == 0
    assert [row.units for row in again] == [row.units for row in rows]
    for row, expected in zip(again, rows, strict=True):
        assert [end for _, end in row.alignment] == pytest.approx([end for _, end in expected.alignment], abs=1e-4)


def test_nothing_usable_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").mkdir()
    assert mfa.main([str(tmp_path / "in"), str(tmp_path / "out.tsv")]) == 1
    assert not (tmp_path / "out.tsv").exists()
    assert "no usable TextGrid" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mfa.main([str(tmp_path / "absent"), str(tmp_path / "out.tsv")])


def test_the_aligner_gets_sound_and_text_side_by_side(tmp_path: Path):
    corpus = write_corpus(tmp_path / "corpus", recordings=1, dev=1)
    lines = read_table(corpus.cvss / "train.tsv")
    write_table(corpus.cvss / "train.tsv", [*lines, ["common_voice_fr_9.mp3", "Without sound."], ["alone"]])
    assert mfa.write_transcripts(corpus.cvss / "train.tsv", corpus.cvss / "train", tmp_path / "mfa") == 4
    for name, text in lines:
        assert (tmp_path / "mfa" / f"{name}.lab").read_text(encoding="utf-8") == text + "\n"
        linked = tmp_path / "mfa" / f"{name}.wav"
        assert linked.samefile(corpus.cvss / "train" / f"{name}.wav")
    assert len(list((tmp_path / "mfa").iterdir())) == 8
