"""CVSS with Common Voice: lists of pairs of French and English speech, from the corpora's folders. No audio is read.

<common_voice>/clips/<name>                 source speech
<common_voice>/{split}.tsv                  columns client_id, path, sentence, ... (or validated.tsv for all splits)
<cvss>/{split}/<name>.wav                   target speech
<cvss>/{split}.tsv                          name, translation; no header
<cvss>/{split}.alignment.tsv                name, "phone:end-second ..." (a forced aligner's output; see data/README)
<cvss>/{split}.references.tsv               name, every accepted translation (optional)

Training needs all these files but the references. Scoring needs the clips, the recordings and their translations.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mmdec.checks.files import quote_path
from mmdec.errors import InputError
from mmdec.phonetics.lexicon import lower_case, read_lexicon, spoken_slice
from mmdec.training.corpora.admission import STRICT, Admission, BadRows
from mmdec.training.corpora.text_files import read_table


def parse_alignment(text: str) -> list[tuple[str, float]]:
    """Parse an alignment, each phone with its end in seconds: "pau:0.224 w:0.262" -> [("pau", 0.224), ("w", 0.262)].

    Raises:
        InputError: For an empty text, for an end that is not a finite number, and for an end before the previous one.
    """
    phones = []
    last = 0.0
    for item in text.split():
        phone, _, end = item.rpartition(":")
        try:
            second = float(end)
        except ValueError:
            second = math.nan
        # written so that NaN, for which every comparison is False, is an error, too
        if not phone or not last <= second < math.inf:
            raise InputError(
                f"`alignment` must list phone:end with ends in rising seconds, but has {item!r} after {last:g}. "
                "Write the file again."
            )
        last = second
        phones.append((phone, second))
    if not phones:
        raise InputError("`alignment` must hold at least one phone, but is empty. Leave the row out.")
    return phones


def phone_names(text: str) -> list[str]:
    """Return the phones of an alignment such as "pau:0.224 w:0.262", without the pauses at both ends.

    Times are not checked.
    """
    names = [item.rpartition(":")[0] for item in text.split()]
    return names[spoken_slice(names)]


SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
WAV_HEADER = 44  # size in bytes of a WAV file's header; a file of this size has no samples
T = TypeVar("T")


@dataclass(frozen=True)
class SpeechPair:
    """One sentence as French and English speech, with texts and the phones of the English recording."""

    name: str  # file name of the French recording, which both corpora use as the key
    clip: Path  # recording of the source sentence (French)
    recording: Path  # recording of the translation (English)
    translation: str  # text of the English recording
    references: tuple[str, ...]  # all accepted translations; only `translation` if no list exists
    alignment: tuple[tuple[str, float], ...]  # (phone, end in seconds) of `recording`, pauses included
    source_text: str = ""  # the source sentence in words; "" if it was not read
    speaker: str = ""

    @property
    def units(self) -> list[str]:
        """The phones of the English recording without the pauses at both ends; [] if there is no alignment."""
        phones = [phone for phone, _ in self.alignment]
        return phones[spoken_slice(phones)]


def read_pairs(
    common_voice: Path, cvss: Path, split: str, *, scoring: bool = False, admission: Admission = STRICT
) -> tuple[list[SpeechPair], BadRows]:
    """Read one split of the corpus.

    Args:
        scoring: Also use rows without a source sentence or an alignment, which only training needs.

    Returns:
        The usable rows, in the order of the split's table, and the bad rows.

    Raises:
        InputError: For a missing table, for names that lead out of their folder, and if no row is usable.
    """
    translations = read_translations(cvss, split, admission)
    sentences = {} if scoring else _read_sentences(common_voice, split)
    alignments = read_alignments(cvss, split, required=not scoring)
    references = _read_keyed_table(cvss / f"{split}.references.tsv")
    resolve = admission.path_resolver(common_voice / "clips")
    pairs, bad = [], BadRows()
    for name, translation in translations:
        clip, recording = resolve(name, f"a row of '{quote_path(cvss / f'{split}.tsv')}'"), cvss / split / f"{name}.wav"
        alignment = _parse_or_empty(alignments.get(name, ""))
        if not scoring and name not in sentences:
            bad.add("no source sentence", name)
        elif not scoring and name not in alignments:
            bad.add("no alignment", name)
        elif not scoring and not alignment:
            bad.add("alignment that cannot be read", name)
        elif not translation.strip():
            bad.add("no translation", name)
        elif not _holds_more(clip, 0):
            bad.add("source recording missing or empty", name)
        elif not holds_samples(recording):
            bad.add("target recording missing or empty", name)
        else:
            accepted = tuple(filter(None, references.get(name, ()))) or (translation,)
            pair = SpeechPair(name, clip, recording, translation, accepted, alignment, *sentences.get(name, ()))
            if pair.units or scoring:
                pairs.append(pair)
            else:
                bad.add("alignment of pauses alone", name)
    if not pairs:
        raise no_rows_error(split, bad)
    return pairs, bad


def no_rows_error(split: str, bad: BadRows) -> InputError:
    """Build the InputError for a split in which every row is bad."""
    reasons = bad.report(between="; ") or "its table is empty"
    return InputError(f"`split` must hold usable rows, but '{split}' has none ({reasons}). Check the paths.")


def read_translations(cvss: Path, split: str, admission: Admission = STRICT) -> list[tuple[str, str]]:
    """Read the (name, translation) of each row of a split. The translation is "" if the row has none."""
    table = _check_exists(cvss / f"{split}.tsv")
    resolve = admission.path_resolver(cvss / split)
    rows: dict[tuple[str, str], None] = {}  # a dict instead of a list, so that repeated lines count only once
    first: dict[str, tuple[str, int]] = {}
    for number, (name, *rest) in read_table(table):
        resolve(f"{name}.wav", f"line {number} of '{quote_path(table)}'")
        text = rest[0] if rest else ""
        if text.strip():
            _check_same(first, name, text, table, number)
        rows[name, text] = None
    return list(rows)


def read_alignments(cvss: Path, split: str, required: bool = True) -> dict[str, str]:
    """Map each recording's name to the text of its alignment, such as "pau:0.224 w:0.262".

    Args:
        required: Whether a missing table raises InputError; if not, it gives {}.
    """
    table = cvss / f"{split}.alignment.tsv"
    if required:
        _check_exists(table)
    return {name: rest[0] if rest else "" for name, rest in _read_keyed_table(table).items()}


def _read_keyed_table(table: Path) -> dict[str, list[str]]:
    """Map the first column of a table to the list of the other columns.

    Returns:
        The map; {} if there is no table.

    Raises:
        InputError: If two rows with the same first column differ.
    """
    rows: dict[str, list[str]] = {}
    first: dict[str, tuple[list[str], int]] = {}
    for number, (name, *rest) in read_table(table):
        _check_same(first, name, rest, table, number)
        rows[name] = rest
    return rows


def _check_same(first: dict[str, tuple[T, int]], name: str, value: T, table: Path, number: int) -> None:
    """Raise InputError if a name is repeated with a different value.

    Args:
        first: The value and line number of each name so far; a new name is added.
        table, number: The file, and the current line's number, for the message.
    """
    value_before, line = first.setdefault(name, (value, number))
    if value_before != value:
        raise InputError(
            f"`corpus` must name each recording once, but line {number} of '{quote_path(table)}' has '{name:.80}' "
            f"again, with something else than line {line}. Remove one of them."
        )


def normalise_source(text: str) -> str:
    """Normalise a source sentence: lower case, no punctuation but apostrophes and hyphens, single spaces."""
    text = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    return " ".join("".join(c if c.isalnum() or c in "'-" else " " for c in text).split())


def unify_targets(pairs: Iterable[SpeechPair]) -> list[SpeechPair]:
    """Give each source sentence a single target.

    All recordings of a sentence get the translation, alignment and English recording of the recording whose name is
    first in alphabetical order.

    Returns:
        The pairs sorted by name.
    """
    first: dict[str, SpeechPair] = {}
    result = []
    for pair in sorted(pairs, key=lambda pair: pair.name):
        chosen = first.setdefault(normalise_source(pair.source_text), pair)
        target = {"translation": chosen.translation, "alignment": chosen.alignment, "recording": chosen.recording}
        result.append(replace(pair, **target))
    return result


def vocabulary(pairs: Iterable[SpeechPair]) -> list[str]:
    """Return the special tokens (<s>, <pad>, </s>, <unk>), then all phones of the pairs in alphabetical order."""
    return [*SPECIALS, *sorted({unit for pair in pairs for unit in pair.units})]


def holds_samples(wav: Path) -> bool:
    """Return whether a WAV file is there and is longer than its header."""
    return _holds_more(wav, WAV_HEADER)


def _holds_more(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size > size


def _check_exists(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"`{path.name}` must exist, but '{path}' does not. Build the corpus, or check the path.")
    return path


def _parse_or_empty(text: str) -> tuple[tuple[str, float], ...]:
    try:
        return tuple(parse_alignment(text))
    except InputError:
        return ()


def _read_sentences(common_voice: Path, split: str) -> dict[str, tuple[str, str]]:
    """Map the name of each French recording to its (sentence, speaker)."""
    table = common_voice / f"{split}.tsv"
    table = _check_exists(table if table.is_file() else common_voice / "validated.tsv")
    lines = read_table(table)
    _, columns = next(lines, (1, []))
    try:
        path, sentence, speaker = (columns.index(name) for name in ("path", "sentence", "client_id"))
    except ValueError as error:
        raise InputError(
            f"`{table.name}` must have the columns client_id, path and sentence, but line 1 of '{quote_path(table)}' "
            f"has {columns!s:.200}. Use Common Voice's own tables."
        ) from error
    sentences: dict[str, tuple[str, str]] = {}
    first: dict[str, tuple[tuple[str, str], int]] = {}
    for number, line in lines:
        if len(line) > max(path, sentence, speaker):
            row = line[sentence], line[speaker]
            _check_same(first, line[path], row, table, number)
            sentences[line[path]] = row
    return sentences


def corpus_lexicon(root: Path) -> dict[str, list[tuple[str, ...]]] | None:
    """Read the corpus's pronunciation lexicon.

    Returns:
        A dict from each lower-case English word to its pronunciations, which are tuples of phones; None if `root` has
        no lexicon.tsv.
    """
    path = root / "lexicon.tsv"
    return lower_case(read_lexicon(path)) if path.is_file() else None
