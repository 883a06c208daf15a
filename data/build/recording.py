"""Records the corpus in the layout of Common Voice and CVSS-C; resumable, parallel, independent of job order."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

import english_voice
import numpy as np
import soundfile
import voices
from lexicon import build_lexicon, english_words
from parent import end_with_parent
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from splits import Sentence, in_order, recordings_of, sample_train, share
from tables import journal, whole, write_text

SPLITS = ("train", "dev", "test", "test_voices")
_HEADER = ("client_id", "path", "sentence", "up_votes", "down_votes", "age", "gender", "accents", "locale", "segment")
_JOURNAL = "journal.tsv"


@dataclass(frozen=True)
class Plan:
    """What to build. The same plan and grammar give the same files."""

    sentences: int
    recordings: int
    dev: int
    test: int
    seed: int


@dataclass(frozen=True)
class Recording:
    """One row of the corpus."""

    number: int
    split: str
    sentence: Sentence
    translation: str

    @property
    def clip(self) -> str:
        return f"common_voice_fr_{self.number:08d}.mp3"


@dataclass(frozen=True)
class Task:
    """Recordings that share one English text: it is spoken once and linked."""

    english: str
    rows: tuple[tuple[int, str, str], ...]  # number, split, French
    known: bool  # its phones are in the journal already


def plan_recordings(plan: Plan, sentences: Sequence[Sentence]) -> list[Recording]:
    """All rows, numbered, training first. The first recording of a sentence has the canonical rendering."""
    pools = {split: [s for s in sentences if s.split == split] for split in ("train", "dev", "test")}
    rows: list[Recording] = []
    chosen_train = sample_train(pools["train"], plan.sentences, plan.seed)
    for sentence, times in zip(chosen_train, recordings_of(chosen_train, plan.recordings), strict=True):
        for turn in range(times):
            options = sentence.renderings
            chosen = options[int(share(plan.seed, sentence.key, turn) * len(options))] if turn else options[0]
            rows.append(Recording(len(rows) + 1, "train", sentence, chosen))
    tests = in_order(pools["test"], plan.seed)
    tests_again = [*tests[plan.test : 2 * plan.test], *tests][: plan.test]
    held = {
        "dev": in_order(pools["dev"], plan.seed)[: plan.dev],
        "test": tests[: plan.test],
        "test_voices": tests_again,
    }
    for split, chosen_sentences in held.items():
        for sentence in chosen_sentences:
            rows.append(Recording(len(rows) + 1, split, sentence, sentence.renderings[0]))
    return rows


def _generator(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])


def _clip_path(root: Path, number: int) -> Path:
    return root / "cv" / "fr" / "clips" / f"common_voice_fr_{number:08d}.mp3"


def _wav_path(root: Path, split: str, number: int) -> Path:
    return root / "cvss_c" / split / f"common_voice_fr_{number:08d}.mp3.wav"


def _record_french(root: Path, seed: int, number: int, split: str, french: str) -> None:
    path = _clip_path(root, number)
    if path.exists():
        return
    samples, _ = voices.record(french, _generator(seed, number), held_out=split == "test_voices")
    with whole(path) as partial:
        soundfile.write(partial, samples, voices.RATE, format="MP3")


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return
    with whole(target) as partial:
        os.link(source, partial)


def run_task(root: Path, seed: int, task: Task) -> tuple[Task, str, list[str]]:
    """Record one task; gives its alignment ("" if known) and what failed, by name."""
    alignment, failed = "", []
    first_number, first_split, _ = task.rows[0]
    source = _wav_path(root, first_split, first_number)
    try:
        if not (task.known and source.exists()):
            alignment = english_voice.synthesise(task.english, source)
        for number, split, _ in task.rows[1:]:
            _link(source, _wav_path(root, split, number))
    except Exception as error:  # one bad sentence must not end a build of hours: it is named at the end
        failed.append(f"{task.english}: {error}")
    for number, split, french in task.rows:
        try:
            _record_french(root, seed, number, split, french)
        except Exception as error:
            failed.append(f"{french}: {error}")
    return task, alignment, failed


def write_tables(root: Path, plan: Plan, rows: Sequence[Recording], alignments: dict[str, str]) -> None:
    """The four tables of every split, of the rows whose audio is there."""
    for split in SPLITS:
        here = [
            row
            for row in rows
            if row.split == split
            and row.translation in alignments
            and _clip_path(root, row.number).exists()
            and _wav_path(root, split, row.number).exists()
        ]
        french = []
        for row in here:
            voice = voices.speaker(_generator(plan.seed, row.number), held_out=split == "test_voices")
            accent = f"{voices.ACCENTS[voice.accent]} (espeak-ng, {voice.variant})"
            french.append((voice.name, row.clip, row.sentence.french, "2", "0", "", voice.gender, accent, "fr", ""))
        write_text(root / "cv" / "fr" / f"{split}.tsv", [_HEADER, *french])
        folder = root / "cvss_c"
        write_text(folder / f"{split}.tsv", [(row.clip, row.translation) for row in here])
        write_text(folder / f"{split}.references.tsv", [(row.clip, *row.sentence.renderings) for row in here])
        write_text(folder / f"{split}.alignment.tsv", [(row.clip, alignments[row.translation]) for row in here])


def _check_manifest(root: Path, plan: Plan, rows: Sequence[Recording]) -> str | None:
    """Write what this folder holds, or say why it cannot go on with what is there."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(f"{row.split}\t{row.sentence.french}\t{row.translation}\n".encode())
    manifest = {**asdict(plan), "text": digest.hexdigest(), "espeak_variants": len(voices.variants())}
    path = root / "corpus.json"
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != manifest:
            return (
                f"`--out` must be empty or hold a corpus begun with the same arguments and grammar, but is {root}. "
                "Choose another folder, or remove this one."
            )
        return None
    root.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return None


def build(root: Path, plan: Plan, sentences: Sequence[Sentence], jobs: int, *, stats: bool = False) -> int:
    """Build or complete the corpus at `root`. Gives the exit code: 1 if any synthesis failed, 2 for a wrong folder."""
    rows = plan_recordings(plan, sentences)
    problem = _check_manifest(root, plan, rows)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    (root / "cv" / "fr" / "clips").mkdir(parents=True, exist_ok=True)
    grouped: dict[str, list[Recording]] = {}
    for row in rows:
        grouped.setdefault(row.translation, []).append(row)
    failed: list[str] = []
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        ProcessPoolExecutor(jobs, initializer=end_with_parent, initargs=(os.getpid(),)) as pool,
        journal(root / _JOURNAL) as (done, add),
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        alignments = {text: said for text, (said,) in done.items()}
        tasks = [
            Task(text, tuple((row.number, row.split, row.sentence.french) for row in same), text in alignments)
            for text, same in grouped.items()
        ]
        bar = progress.add_task("recordings", total=len(rows))
        work = repeat(root), repeat(plan.seed), tasks
        for count, (task, alignment, bad) in enumerate(pool.map(run_task, *work, chunksize=8)):
            if alignment:
                alignments[task.english] = alignment
                add(task.english, alignment)
            failed += bad
            progress.advance(bar, len(task.rows))
            if count % 1500 == 1499:
                write_tables(root, plan, rows, alignments)  # a trainer may begin on what is there
    write_tables(root, plan, rows, alignments)
    spoken = [(text, english_voice.phones_in(alignments[text])) for text in grouped if text in alignments]
    vocabulary = sorted({word for text, _ in spoken for word in english_words(text)})
    with ThreadPoolExecutor(jobs) as pool:  # flite runs beside Python, so threads do
        alone = dict(zip(vocabulary, pool.map(english_voice.phones_of, vocabulary), strict=True))
    entries, exact = build_lexicon(spoken, alone.__getitem__)
    write_text(root / "lexicon.tsv", [(word, " ".join(phones)) for word, phones in entries])
    if stats:
        _print_stats(root, rows, entries, exact)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} recordings failed; run the same command again to try them once more.", file=sys.stderr)
    return 1 if failed else 0


def _print_stats(root: Path, rows: Sequence[Recording], entries: Sequence[tuple], exact: float) -> None:
    present = Counter(row.split for row in rows if _clip_path(root, row.number).exists())
    for split in SPLITS:
        print(f"recordings, {split}: {present[split]}")
    print(f"English words: {len({word for word, _ in entries})}, pronunciations: {len(entries)}")
    print(f"English texts that divide exactly into the lexicon's words: {exact:.4%}")
