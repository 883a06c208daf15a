"""English speech: flite's voice slt, the phones that it says with their exact end times, and how it says single words.

python data/build/english_voice.py --pairs data/everyday data/phrasebook --out data/english_voice --lexicon pron.tsv

Records English training sentences in CVSS' layout (wavs, texts, alignments); resumable. `--lexicon` writes the words of
all training sentences with their phones, then the rules by which letters are read in other words (letter_rules.py).
"""

import argparse
import hashlib
import re
import string
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from letter_rules import learn
from lexicon import Phones, build_lexicon, english_words
from splits import share
from tables import journal, read_journal, whole, write_text

from mmdec.phonetics.spelling import ABBREVIATIONS
from mmdec.phonetics.spelling import NUMBER_WORDS as NUMBER_WORDS

VOICE = "slt"
JOURNAL = "journal.tsv"
DEV_SHARE = 0.02  # of the recordings, to watch training by
WORDS = 15  # of a sentence
SAID = {"hmm": "hh ah m", "mm": "m", "mmm": "m", "shh": "sh", "psst": "p s t", "brr": "b r", "miz": "m ih z"}
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
_PLAIN = re.compile(r"[A-Za-z' ,.?!;-]+")


def synthesise(text: str, path: Path) -> str:
    """Write `text` as 16 kHz PCM16 to `path`, whole or not at all; gives "phone:END phone:END ..." in seconds."""
    with whole(path) as partial:
        command = ["flite", "-voice", VOICE, "-psdur", "-t", text, "-o", str(partial)]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        if ":" not in output or partial.stat().st_size < 3200:
            raise RuntimeError(f"flite gave no sound for {text!r}")
    return output


def phones_of(text: str) -> list[str]:
    """The phones of `text` said on its own, pauses left out."""
    command = ["flite", "-voice", VOICE, "-ps", "-t", text, "-o", "none"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [phone for phone in output.split() if phone != "pau"]


def phones_in(alignment: str) -> list[str]:
    """The phones of an alignment line, pauses left out."""
    phones = [item.rpartition(":")[0] for item in alignment.split()]
    return [phone for phone in phones if phone != "pau"]


def training_texts(folders: Sequence[Path]) -> list[str]:
    """The distinct English sentences of the training pairs, folder after folder in turn, each by a fixed order."""
    columns = []
    for folder in folders:
        lines = (folder / "train.tsv").read_text(encoding="utf-8").splitlines()
        columns.append(sorted({text for line in lines for text in line.split("\t")[3:]}, key=share))
    return list(dict.fromkeys(text for column in columns for text in column))


def chosen_texts(folders: Sequence[Path], count: int) -> list[str]:
    """`count` training sentences of 1 to 15 words, an equal part of every eighth from each folder after the first."""
    pools = [[text for text in training_texts([folder]) if len(text.split()) <= WORDS] for folder in folders]
    part = count // 8
    rest = [text for pool in pools[1:] for text in pool[:part]]
    return list(dict.fromkeys([*rest, *pools[0][: count - len(rest)]]))


def record(out: Path, texts: Sequence[str], jobs: int) -> list[str]:
    """Record what is not there yet and write the tables; gives what failed, by name."""
    names = {text: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12] for text in texts}
    splits = {text: "dev" if share("voice", text) < DEV_SHARE else "train" for text in texts}
    out.mkdir(parents=True, exist_ok=True)

    def one(text: str) -> tuple[str, str, str]:
        try:
            return text, synthesise(text, out / splits[text] / f"{names[text]}.wav"), ""
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            return text, "", f"{text}: {error}"

    failed = []
    with ThreadPoolExecutor(jobs) as pool, journal(out / JOURNAL) as (done, add):
        alignments = {text: said for text, (said,) in done.items()}
        for text, said, problem in pool.map(one, [text for text in texts if text not in alignments]):
            if problem:
                failed.append(problem)
                continue
            alignments[text] = said
            add(text, said)
    for split in ("train", "dev"):
        here = [text for text in texts if text in alignments and splits[text] == split]
        write_text(out / f"{split}.tsv", [(names[text], text) for text in here])
        write_text(out / f"{split}.alignment.tsv", [(names[text], alignments[text]) for text in here])
    return failed


def pronounced(words: Sequence[str], folder: Path) -> dict[str, Phones]:
    """What flite says for each word alone: one run, a word a paragraph."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        listed = Path(scratch) / "words.txt"
        listed.write_text("\n\n".join(words) + "\n", encoding="utf-8")
        command = ["flite", "-voice", VOICE, "-ps", "-f", str(listed), "-o", "none"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    said = [tuple(phone for phone in line.split() if phone != "pau") for line in lines]
    return dict(zip(words, said, strict=True))


def write_lexicon(path: Path, texts: Sequence[str], recorded: Mapping[str, str]) -> None:
    """Words of `texts` with their usual phones in the recorded sentences, letters' names, and the rules of letters."""
    words = sorted({word for text in texts for word in english_words(text) if _WORD.fullmatch(word)})
    words = sorted({*words, *NUMBER_WORDS, *ABBREVIATIONS.values()} - set(SAID) - set("bcdefghjklmnopqrstuvwxyz"))
    letters = [f"{letter}." for letter in string.ascii_lowercase]
    alone = pronounced([*words, *letters], path.parent) | {f"{w}": tuple(p.split()) for w, p in SAID.items()}
    plain = [(text, phones_in(said)) for text, said in recorded.items() if _PLAIN.fullmatch(text)]
    plain = [(text, said) for text, said in plain if set(english_words(text)) <= set(alone)]
    entries, exact = build_lexicon(plain, lambda word: list(alone[word]))
    usual = dict(reversed(entries))  # the first of a word is the commonest
    print(f"{len(alone)} words; {exact:.1%} of {len(plain)} sentences divide into them")
    lexicon = {word: usual.get(word) or said for word, said in alone.items() if said}
    rules = learn([(word, said) for word, said in lexicon.items() if word.isalpha() and word.isascii()])
    write_text(path, [(word, " ".join(said)) for word, said in [*sorted(lexicon.items()), *rules.items()]])
    print(f"{len(rules)} rules; {path.stat().st_size} bytes")


def main() -> int:
    """Exit code: 0, or 1 when a synthesis failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, nargs="+", required=True, help="folders with train.tsv, as of tatoeba.py")
    parser.add_argument("--out", type=Path, required=True, help="record sentences in this folder, or go on there")
    parser.add_argument("--lexicon", type=Path, help="write words and rules to this file")
    parser.add_argument("--words", type=Path, nargs="*", default=[], help="more such folders, whose words are listed")
    parser.add_argument("--sentences", type=int, default=8000, help="sentences to record (default 8000)")
    parser.add_argument("--jobs", type=int, default=1, help="programs at once (default 1)")
    arguments = parser.parse_args()
    failed = record(arguments.out, chosen_texts(arguments.pairs, arguments.sentences), arguments.jobs)
    if arguments.lexicon:
        recorded = {text: said for text, (said,) in read_journal(arguments.out / JOURNAL).items()}
        write_lexicon(arguments.lexicon, training_texts([*arguments.pairs, *arguments.words]), recorded)
    for problem in failed:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
