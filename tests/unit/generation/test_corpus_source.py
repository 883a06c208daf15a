"""Tests `mmdec.corpus` and `mmdec index`: sources, the tokenizer that they need, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmdec
from mmdec.cli import main
from mmdec.drafters.corpus import TokenIndex, tokenizer_fingerprint
from mmdec.errors import InputError
from mmdec.generation import corpus_source as module
from mmdec.generation.corpus_source import index_texts, write_index
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.pretrained.language_model import LoadedLanguageModel, load_language_model
from tests.support import tiny_text_folder

TEXT = "the cat sat on the mat\nthe dog sat on the rug\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_folder.write(tmp_path_factory.mktemp("models") / "tiny", [TEXT, *tiny_text_folder.OTHER], 1)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedLanguageModel:
    return load_language_model(folder, "cpu")


def index_of(source: Any, loaded: LoadedLanguageModel) -> TokenIndex:
    return source.drafter_for(loaded.model)._index


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match="`tokenizer` must"):
        mmdec.corpus([TEXT], tokenizer="gpt2")


def test_texts_are_limited_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 2 * len(TEXT))
    assert mmdec.corpus([TEXT, TEXT])
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(InputError, match="its first 3 texts have"):
        mmdec.corpus([TEXT, TEXT, tmp_path / "text.txt"])


def test_texts_and_files_give_the_same_index(loaded: LoadedLanguageModel, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    path, tokens = write_index([file], folder, tmp_path / "texts.safetensors")
    made = [index_of(mmdec.corpus(source), loaded) for source in ([TEXT], [file], path, str(path))]
    assert [index.tokens.tolist() for index in made] == [made[0].tokens.tolist()] * 4
    assert len(made[0]) == tokens
    assert made[0].tokens.tolist()[:-1] == loaded.tokenizer(TEXT, add_special_tokens=False)["input_ids"]


def test_the_name_of_an_index_is_a_drafter(loaded: LoadedLanguageModel, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    inputs = loaded.text_inputs("the cat")
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    plain = mmdec.generate(loaded.model, inputs, None, **options)
    file.write_text(loaded.tokenizer.decode(plain.sequences[0], skip_special_tokens=True), encoding="utf-8")
    path, _ = write_index([file], folder, tmp_path / "texts.safetensors")
    for drafter in (str(path), path, mmdec.corpus(path)):
        result = mmdec.generate(loaded.model, inputs, drafter, num_speculative_tokens=6, **options)
        assert torch.equal(result.sequences, plain.sequences)
    assert sum(sum(round_.drafted) for round_ in result.rounds)


def test_transcripts_have_no_line_ends(loaded: LoadedLanguageModel) -> None:
    index = index_texts(["a  b\n\nc\n", "\n \n"], loaded.tokenizer, spoken=True)
    first = loaded.tokenizer(" a b c", add_special_tokens=False)["input_ids"]
    assert index.tokens.tolist()[: len(first) + 1] == [*first, -1]


def test_long_texts_are_tokenized_in_parts(loaded: LoadedLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PART", 10)
    parts = list(module._parts("one two\nthree four five\n\nx" + "y" * 25))
    assert "".join(parts) == "one two\nthree four five\n\nx" + "y" * 25
    assert max(map(len, parts)) <= 10
    assert len(index_texts([TEXT], loaded.tokenizer, spoken=False)) > 10


def test_an_index_of_another_tokenizer_is_refused(loaded: LoadedLanguageModel, tmp_path: Path) -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {**loaded.tokenizer.get_vocab(), "<other>": 10**6}

    path = TokenIndex.from_texts([[5, 6]], tokenizer_fingerprint(Other())).save(tmp_path / "x.safetensors")
    for drafter in (mmdec.corpus(path), str(path)):
        with pytest.raises(InputError, match=r"`drafter` must be an index for the model's tokenizer, but .*x\.safe"):
            mmdec.generate(loaded.model, loaded.text_inputs("the cat"), drafter, max_new_tokens=3)


def test_a_model_without_a_tokenizer_needs_one(loaded: LoadedLanguageModel) -> None:
    from tests.support.tiny_text import language_model

    source = mmdec.corpus([TEXT])
    with pytest.raises(InputError, match="`tokenizer` must be given"):
        source.drafter_for(language_model("llama"))
    assert mmdec.corpus([TEXT], tokenizer=loaded.tokenizer).drafter_for(language_model("llama")).name


def test_the_corpus_drafter_is_made_once_a_model_and_survives_pickling(
    loaded: LoadedLanguageModel, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    path, _ = write_index([file], folder, tmp_path / "texts.safetensors")
    for source in (mmdec.corpus([TEXT]), mmdec.corpus(path)):
        drafter = source.drafter_for(loaded.model)
        assert drafter is source.drafter_for(loaded.model)
        copy = pickle.loads(pickle.dumps(Speculation(DecodingOptions(source)))).drafter_for(loaded.model)
        assert copy.name == drafter.name


def test_copies_of_a_source_share_their_drafters(loaded: LoadedLanguageModel) -> None:
    from tests.support.tiny_text import language_model

    model = language_model("llama")
    target: Any = SimpleNamespace(model=model, directory=None, tokenizer=loaded.tokenizer)
    for source in (mmdec.corpus([TEXT]), mmdec.small_model(loaded.model)):
        copy = source.for_target(target)
        assert copy is not source
        drafter = copy.drafter_for(model)
        assert drafter is source.for_target(target).drafter_for(model)
        assert drafter is source.drafter_for(model)  # calls with and without the tokenizer may alternate
    with pytest.raises(InputError, match="`tokenizer` must be given"):
        mmdec.corpus([TEXT]).drafter_for(model)


def test_a_copy_of_a_small_model_remembers_the_callers_name(
    folder: Path, loaded: LoadedLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    source = mmdec.small_model(folder.name, inner="lookup")
    monkeypatch.chdir("/")
    target: Any = SimpleNamespace(model=loaded.model, directory=None, tokenizer=loaded.tokenizer)
    assert source.for_target(target).__reduce__() == source.__reduce__()


@pytest.mark.parametrize("source", ["a text", "", [], None, 3, b"x", [3], ["a", None], {"a": 1}, Path("text.txt")])
def test_what_is_no_corpus_is_refused(source: Any) -> None:
    with pytest.raises(InputError, match=r"`source` must be an index's file"):
        mmdec.corpus(source)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not exist"):
        mmdec.corpus([tmp_path / "none.txt"])
    with pytest.raises(InputError, match="does not exist"):
        mmdec.corpus(tmp_path / "none.safetensors")
    (tmp_path / "latin.txt").write_bytes("déjà".encode("latin-1"))
    with pytest.raises(InputError, match="must be text in UTF-8"):
        mmdec.corpus([tmp_path / "latin.txt"])
    (tmp_path / "long.txt").write_text("x" * 100, encoding="utf-8")
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 99)
    with pytest.raises(InputError, match="at most 99 bytes"):
        mmdec.corpus([tmp_path / "long.txt"])


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["mmdec", "index", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_writes_an_index_and_refuses_what_it_cannot_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    output = tmp_path / "new" / "texts.safetensors"
    words = [str(tmp_path / "a.txt"), "--model", str(folder), "--output", str(output)]
    assert run(monkeypatch, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(output), "tokens": len(TokenIndex.load(output))}
    assert run(monkeypatch, *words[:-1], str(tmp_path / "texts.bin")) == 2
    assert "`--output` must end with .safetensors" in capsys.readouterr().err
    assert run(monkeypatch, str(tmp_path / "none.txt"), *words[1:]) == 2
    assert "does not exist" in capsys.readouterr().err
    (bare := tmp_path / "bare").mkdir()
    assert run(monkeypatch, words[0], "--model", str(bare), *words[3:]) == 2
    assert "must have a tokenizer" in capsys.readouterr().err
