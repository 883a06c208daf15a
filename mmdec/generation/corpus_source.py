"""`mmdec.corpus`: texts that resemble the answer, or an index of them, as a drafter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast, final

from transformers import PreTrainedModel

from mmdec.checks.arguments import check_methods, format_value
from mmdec.checks.files import quote_path, read_text
from mmdec.checks.weights import WEIGHTS_SUFFIX, read_settings
from mmdec.drafters.corpus import MAX_INDEX_TOKENS, CorpusDrafter, TokenIndex, tokenizer_fingerprint
from mmdec.errors import InputError
from mmdec.generation.auto_drafter import is_speech_model
from mmdec.generation.drafter_source import DrafterCache, DrafterSource, LoadedTarget
from mmdec.hub.find import TOKENIZER_FILES, find_model
from mmdec.pretrained.language_model import folder_tokenizer
from mmdec.pretrained.load_small_model import required_tokenizer
from mmdec.types import Drafter

MAX_TEXT_BYTES = 16 * MAX_INDEX_TOKENS  # maximum size of a text file: more bytes than an index's tokens ever have
MAX_PART = 2**18  # maximum characters that are tokenized at once: a tokenizer needs many bytes for each
Text: TypeAlias = "str | os.PathLike[str]"


def corpus(source: Text | Sequence[Text], *, tokenizer: Any = None) -> Corpus:
    """Make a drafter of texts that the answers may resemble: documents, code, transcripts, earlier answers.

    Pass it as `drafter` to `generate`, `stream`, `speculate`, `transcribe` or `describe`. It drafts what followed the
    newest tokens in these texts, and in the text so far. Texts that do not resemble the answer cost time and never
    change it.

    Args:
        source: The file of an index that `mmdec index` wrote; its name ends with .safetensors. Or a list of texts, and
            of paths (`pathlib.Path`) of text files in UTF-8, which are indexed when the model is known.
        tokenizer: The tokenizer of the model that is drafted for. Default None: the one in its folder.

    Returns:
        The drafter.

    Raises:
        InputError: For another source, a file that cannot be read, a damaged index, and more tokens than an index
            holds. When decoding begins: for an index that was made with another model's tokenizer.

    References:
        REST (2311.08252), Token Map Drafting (2507.21522), ANPD (2404.08698), ADED (2407.12021).
    """
    if tokenizer is not None:
        check_methods("tokenizer", tokenizer, ("get_vocab", "__call__"), "Pass the model's tokenizer.")
    if isinstance(source, (str, os.PathLike)):
        if os.fsdecode(source).endswith(WEIGHTS_SUFFIX):
            return Corpus(TokenIndex.load(source), (), tokenizer, os.fsdecode(source))
    elif _are_texts(source):
        return Corpus(None, _read_texts(source), tokenizer)
    raise InputError(
        f"`source` must be an index's file, which ends with {WEIGHTS_SUFFIX}, or a list of texts and of paths of text "
        f"files, but is {format_value(source)}. Make an index with `mmdec index`, or give [text]."
    )


def _are_texts(source: object) -> bool:
    """Return whether this is a list of texts and paths. Callers may ignore the type hints."""
    items = cast(Sequence[object], source) if isinstance(source, (list, tuple)) else ()
    return len(items) > 0 and all(isinstance(item, (str, os.PathLike)) for item in items)


@final
class Corpus(DrafterSource):
    """What `mmdec.corpus` returns: an index, or texts that are indexed for each model's tokenizer.

    Args:
        index: None: it is made of the texts.
        texts: Its texts; () if there is an index.
        tokenizer: The target's; None: the one in its folder.
        path: The index's file, for errors.
        drafters: The drafters so far, for a copy; None: there are none.
    """

    def __init__(
        self,
        index: TokenIndex | None,
        texts: Sequence[str],
        tokenizer: Any = None,
        path: str = "",
        drafters: DrafterCache | None = None,
    ) -> None:
        self._index, self._texts, self._tokenizer, self._path = index, texts, tokenizer, path
        self._drafters = DrafterCache() if drafters is None else drafters

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        if self._path:
            return _reopen, (self._path, self._tokenizer)
        return Corpus, (self._index, self._texts, self._tokenizer)

    def for_target(self, target: LoadedTarget) -> Corpus:
        if self._tokenizer is not None:
            return self
        return Corpus(self._index, self._texts, target.tokenizer, self._path, self._drafters)

    def drafter_for(self, model: PreTrainedModel) -> Drafter:
        return self._drafters.get(model, self._tokenizer, lambda: CorpusDrafter(self._index_for(model)))

    def _index_for(self, model: PreTrainedModel) -> TokenIndex:
        tokenizer = required_tokenizer(model, self._tokenizer, "mmdec.corpus")
        if self._index is None:
            return index_texts(self._texts, tokenizer, is_speech_model(model))
        if self._index.tokenizer != tokenizer_fingerprint(tokenizer):
            raise InputError(
                f"`drafter` must be an index for the model's tokenizer, but '{quote_path(self._path)}' was made for "
                "another. Make one with `mmdec index` and this model."
            )
        return self._index


def _reopen(path: str, tokenizer: Any) -> Corpus:
    return corpus(path, tokenizer=tokenizer)


def write_index(files: Sequence[Text], model: Text, output: Text) -> tuple[Path, int]:
    """Index text files for the tokenizer of a model, and write the index to a file.

    Args:
        files: In UTF-8.
        model: Name, folder or Hugging Face id of the model; only its tokenizer is loaded.
        output: The index's file, whose name ends with .safetensors.

    Returns:
        The file, and its number of tokens.

    Raises:
        InputError: If a file cannot be read, the model has no tokenizer, or there are too many tokens.
    """
    if Path(output).suffix != WEIGHTS_SUFFIX:
        raise InputError(f"`output` must end with {WEIGHTS_SUFFIX}, but is '{quote_path(output)}'. Rename it.")
    texts = _read_texts([Path(file) for file in files])
    folder = find_model(model, None, ("*.json", *TOKENIZER_FILES))
    tokenizer = folder_tokenizer(folder)
    if tokenizer is None:
        raise InputError(
            f"`model` must have a tokenizer in its folder, but '{quote_path(folder)}' has none. Name a "
            "model whose folder has one."
        )
    hears = "num_mel_bins" in read_settings(folder / "config.json")
    index = index_texts(texts, tokenizer, hears)
    return index.save(output), len(index)


def _read_texts(sources: Sequence[Text]) -> tuple[str, ...]:
    """Return texts, and the contents of the files that paths name."""
    texts, size = list[str](), 0
    for source in sources:
        texts.append(source if isinstance(source, str) else read_text(source, "source", MAX_TEXT_BYTES))
        size += len(texts[-1])
        if size > MAX_TEXT_BYTES:
            raise InputError(
                f"`source` must have at most {MAX_TEXT_BYTES} characters in all, but its first {len(texts)} texts have "
                f"{size}. Leave some out."
            )
    return tuple(texts)


def index_texts(texts: Sequence[str], tokenizer: Any, spoken: bool) -> TokenIndex:
    """Index texts.

    Args:
        tokenizer: The target's tokenizer.
        spoken: Whether the target transcribes speech: it writes no line ends, and a space before the first word.
    """
    return TokenIndex.from_texts(_token_ids(texts, tokenizer, spoken), tokenizer_fingerprint(tokenizer))


def _token_ids(texts: Sequence[str], tokenizer: Any, spoken: bool) -> Iterator[Sequence[int]]:
    for text in texts:
        for part in _parts(text.encode("utf-8", "ignore").decode()):
            words = f" {' '.join(part.split())}" if spoken and part.strip() else part
            yield tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]


def _parts(text: str) -> Iterator[str]:
    """Cut a text at line ends, or spaces, into parts of at most `MAX_PART` characters."""
    while len(text) > MAX_PART:
        cut = max(text.rfind("\n", 1, MAX_PART), 0) or max(text.rfind(" ", 1, MAX_PART), 0) or MAX_PART
        yield text[:cut]
        text = text[cut:]
    yield text
