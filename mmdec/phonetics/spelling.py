"""English text to the phones of a voice: figures as words, words by a lexicon, other words by letter rules.

Nothing is refused: what has no English sound (emoji, other scripts) is left out.
"""

from __future__ import annotations

from pathlib import Path


class Speller:
    """Reads English text aloud, as phones. `read` makes one of `pronunciation.tsv`."""

    @classmethod
    def read(cls, path: Path) -> Speller:
        """Read lines of word, tab, phones; the rules follow as "left(letters)right", tab, phones. Raises InputError
        for a file that cannot be read."""
        raise NotImplementedError

    def phones(self, text: str) -> list[str]:
        """flite's names of the phones of `text`; "pau" between clauses and sentences, none at the ends."""
        raise NotImplementedError
