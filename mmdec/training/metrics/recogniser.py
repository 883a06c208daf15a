"""A speech recogniser for ASR-BLEU, independent of our models: pocketsphinx with its US English acoustic model.

Its language model is a trigram of the *training* translations, without case and punctuation. Its dictionary is
pocketsphinx's. Words that this dictionary lacks get pronunciations from the corpus's lexicon. Each utterance is
recognised independently of the earlier ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from mmdec.phonetics.lexicon import PAUSE
from mmdec.phonetics.ngram import NGram
from mmdec.training.metrics.text import Lexicon, normalise_words
from mmdec.types import InputError

SAMPLE_RATE = 16_000  # sample rate in Hz that the acoustic model reads
SPELLED = {"ax": "AH", "axr": "ER"}  # names of phones, lexicon -> acoustic model; other names differ only by case
PHONES = frozenset(
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split()  # noqa: SIM905 # a list would take 40 lines
)
SETTINGS: Mapping[str, float] = {"lw": 6.5, "wip": 0.65}  # language weight, word insertion penalty; tuned on "dev"
PEAK = 0.5  # samples are scaled to this largest absolute value; 1 is full scale


@final
class Recogniser:
    """Recognises English speech as lower-case words. Needs the extra `mmdec[eval]`. State: pocketsphinx's decoder."""

    name = "pocketsphinx"

    def __init__(self, sentences: Iterable[str], lexicon: Lexicon) -> None:
        """sentences: texts from which the language model is built. lexicon: lower-case word -> pronunciations (lists of
        phones), for words that pocketsphinx's dictionary lacks. Raises InputError if pocketsphinx is not installed."""
        try:
            from pocketsphinx import Config, Decoder, get_model_path
        except ImportError as error:
            raise InputError(
                "ASR-BLEU needs pocketsphinx, which is not installed. pip install 'mmdec[eval]'"
            ) from error
        texts = [spoken_words(sentence) for sentence in sentences]
        model = NGram.build([text for text in texts if text])
        pronunciations = dictionary(model.vocabulary, lexicon, Path(get_model_path("en-us/cmudict-en-us.dict")))
        # words that pocketsphinx cannot recognise, because they have no pronunciation
        self.unknown = tuple(sorted(model.vocabulary - pronunciations.keys()))
        with tempfile.TemporaryDirectory() as folder:
            words, grams = Path(folder) / "words.dict", Path(folder) / "words.arpa"
            lines = [
                f"{word}{f'({rank})' if rank > 1 else ''} {' '.join(phones)}\n"
                for word, variants in sorted(pronunciations.items())
                for rank, phones in enumerate(variants, 1)
            ]
            words.write_text("".join(lines), encoding="utf-8")
            model.save(grams)
            config = Config(
                hmm=get_model_path("en-us/en-us"),
                dict=str(words),
                lm=str(grams),
                samprate=float(SAMPLE_RATE),
                cmn="batch",
                loglevel="FATAL",
                **SETTINGS,
            )
            self._decoder: Any = Decoder(config)

    def transcribe(self, samples: np.ndarray | Sequence[float], sample_rate: int = SAMPLE_RATE) -> str:
        """Recognise the words in mono samples (T,) in [-1, 1] at 16 kHz. Returns a text; "" if there are no words.
        Raises InputError for another sample rate or other samples."""
        if sample_rate != SAMPLE_RATE:
            raise InputError(f"`sample_rate` must be {SAMPLE_RATE} Hz, but is {sample_rate}. Resample the audio first.")
        signal = np.asarray(samples, dtype=np.float32)
        if signal.ndim != 1 or not np.isfinite(signal).all():
            raise InputError(f"`samples` must be finite and of shape (T,), but are {signal.shape}. Mix down to mono.")
        peak = float(np.abs(signal).max(initial=0.0))
        if peak == 0.0:
            return ""
        level = (signal * (PEAK / peak * 32767)).astype(np.int16)
        self._decoder.start_utt()
        self._decoder.process_raw(level.tobytes(), no_search=False, full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr if hypothesis is not None else ""


def spoken_words(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation. Hyphens separate words; apostrophes stay in them."""
    return [part for word in normalise_words(text) for part in word.split("-") if part]


def dictionary(words: Iterable[str], lexicon: Lexicon, published: Path) -> dict[str, list[list[str]]]:
    """Return the pronunciations of lower-case words, each a list of the acoustic model's phones. Words without a
    pronunciation are left out.

    lexicon: lower-case word -> pronunciations, for words that are not in `published`. published: pocketsphinx's
        dictionary file.
    """
    wanted = set(words)
    pronunciations: dict[str, list[list[str]]] = {}
    with published.open(encoding="utf-8") as file:
        for line in file:
            entry, *phones = line.split()
            word = entry.partition("(")[0]
            if word in wanted:
                pronunciations.setdefault(word, []).append(phones)
    for word in wanted - pronunciations.keys():
        sounds = [[phone for phone in variant if phone != PAUSE] for variant in lexicon.get(word, ())]
        spelled = [[SPELLED.get(phone, phone.upper()) for phone in variant] for variant in sounds]
        valid = [phones for phones in spelled if phones and PHONES.issuperset(phones)]
        if valid:
            pronunciations[word] = valid
    return pronunciations
