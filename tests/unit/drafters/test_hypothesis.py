"""Tests drafts from a text: the place is found again after a difference, marks and capital letters are branches, and
windows continue where the last one ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mmdec.core.tree import chain_drafts
from mmdec.drafters.hypothesis import (
    COMMA,
    NONE,
    STOP,
    Follower,
    HypothesisDrafter,
    Script,
    TokenText,
    clean_text,
    mark_kind,
    word_key,
    word_spans,
)
from mmdec.types import Context, Plan, Scores, Verdict
from tests.support.tiny_whisper import build_tokenizer

TEXT = "And so, my fellow Americans, ask not what your country can do for you. Ask what you can do for your country."
TOKENIZER = build_tokenizer([TEXT, TEXT.lower()], 400)
END, FIRST = TOKENIZER.convert_tokens_to_ids("<|endoftext|>"), TOKENIZER.convert_tokens_to_ids("<|0.00|>")
TOKEN_TEXT = TokenText(TOKENIZER, len(TOKENIZER), FIRST, [END])


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Run:
    """A run of rows, fed by hand."""

    def __init__(self, *texts: str, rows: int = 1) -> None:
        self.drafter = HypothesisDrafter([Script(clean_text(text)) for text in texts], TOKEN_TEXT)
        self.rows = rows
        self.begin()

    def begin(self) -> Run:
        ones = torch.ones(self.rows, 1, dtype=torch.long)
        self.state = self.drafter.start(Context(ones, ones.bool(), ones[None], ones[:, 0]))
        return self

    def write(self, *texts: str | list[int], done: bool = False) -> Run:
        """Each row writes a text."""
        rows = [text if isinstance(text, list) else ids(text) for text in texts]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.tensor([[*row, *[-1] * (int(lengths.max()) - len(row))] for row in rows])
        ends, none = torch.tensor([done] * len(rows)), torch.zeros(len(rows), 1).long()
        verdict = Verdict(none, tokens[:, 0], ends, tokens, lengths)
        for row in self.state:  # no pass has scored the last draft
            row.openings.clear()
        self.drafter.update(self.state, chain_drafts(tokens[:, 0], [[]] * len(rows)), Scores(none), verdict)
        return self

    def reject(self, text: str, answers: dict[str, str]) -> Run:
        """Reject a whole draft for `text`; after the branch `key`, the target's likeliest text is `answers[key]`."""
        root = torch.zeros(1, dtype=torch.long)
        draft = self.drafter.propose(self.state, root, Plan(31, 31))
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        logits = torch.zeros(1, len(tokens), len(TOKENIZER))
        branches = [""]
        for node in range(1, len(tokens)):
            branches.append(branches[parents[node]] + TOKENIZER.decode([tokens[node]]))
            if branches[node] in answers:
                logits[0, node, ids(answers[branches[node]])[0]] = 1.0
        assert set(answers) <= set(branches)
        row = self.state[0]
        row.openings = [opening for opening in row.openings if branches[opening[0]] in answers]
        new = torch.tensor([ids(text)])
        verdict = Verdict(root[None], new[:, 0], torch.tensor([False]), new, torch.tensor([new.shape[1]]))
        self.drafter.update(self.state, draft, Scores(logits), verdict)
        return self

    def paths(self, nodes: int = 31, depth: int = 31, row: int = 0, threshold: float = 0.0) -> list[str]:
        """The texts of a row's branches; the first one is the likeliest at every node."""
        roots = torch.zeros(len(self.state), dtype=torch.long)
        draft = self.drafter.propose(self.state, roots, Plan(nodes, depth, threshold=threshold))
        size = int(draft.size[row])
        assert size - 1 <= nodes
        tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
        branches = list[str]()

        def visit(node: int, before: list[int]) -> None:
            children = [child for child in range(1, size) if parents[child] == node]
            for child in children:
                visit(child, [*before, tokens[child]])
            if node and not children:
                assert len(before) <= depth
                branches.append(TOKENIZER.decode(before, decode_with_timestamps=True))

        visit(0, [])
        return branches

    def first(self, **options: Any) -> str:
        return next(iter(self.paths(**options)), "")


def test_the_rest_of_the_text_is_drafted_up_to_its_end() -> None:
    run = Run(TEXT).write(" And")
    assert run.first().startswith(" so, my fellow")
    assert run.write(" so, my fellow Am").first().startswith("ericans, ask")  # the rest of a word
    assert run.write("ericans, ask not what your country can do for you.").first().startswith(" Ask what you")
    assert run.write(" Ask what you can do for your").first() == " country.<|endoftext|>"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (" And so, my dear", " Americans,"),  # another word
        (" And so, my very dear fellow", " Americans,"),  # two more
        (" And so, Americans", ", ask"),  # two fewer
        (" and SO my fellow americans", ", ask"),  # case and marks are not compared
        (" Hello there! And so, my fellow", " Americans,"),
        (" And so, my fellow Americans ask", " not"),
        (" country can do for", " you. Ask"),  # the beginning is missing
    ],
)
def test_drafting_resumes_in_the_hypothesis_after_a_difference(written: str, expected: str) -> None:
    assert any(path.startswith(expected) for path in Run(TEXT).write(written).paths())


def test_marks_and_capitals_are_branches_where_the_text_has_none() -> None:
    run = Run("and so my fellow americans ask not").write(" And so")
    assert {path[:4] for path in run.paths(nodes=63)} >= {" my ", ", my", ". My"}
    assert run.write(".").first().startswith(" My fellow")
    assert run.write(" My fellow Americans, ask not. Once more:").first() == "<|endoftext|>"
    again = Run("the americans ask the americans").write(" The Americans ask the")
    assert again.first().startswith(" Americans")  # as the target has written it before


def test_a_rejected_branch_shows_how_the_target_goes_on() -> None:
    text = "and so my fellow americans ask not"
    plain = Run(text).write(" And").write(", so").first()
    assert plain.startswith(" my fellow")
    run = Run(text).write(" And").reject(", so", {" so": ","})
    assert run.first().startswith(", my fellow")
    run = Run(text).write(" And").reject(", so", {" so": " your"})
    assert run.first().startswith(" your fellow")  # another word takes the place of one


def test_upper_case_is_drafted_as_lower_case() -> None:
    assert Run(TEXT.upper().replace(",", "")).write(" And").first().startswith(" so my fellow")


def test_words_without_spaces_are_followed_by_character() -> None:
    run = Run("今日はいい天気です。明日は雨です。").write("今日はいい天気")
    assert run.first().startswith("です。明日")


def test_the_next_window_begins_behind_the_last_pair_of_timestamps() -> None:
    run = Run(TEXT)
    times = [FIRST + 100]
    run.write([FIRST, *ids(" And so, my fellow Americans,"), *times])
    assert any(path.startswith("<|2.00|> ask not what") for path in run.paths())
    run.write([*times, *ids(" ask not what your"), END], done=True)  # this part is decoded again
    assert run.begin().write([FIRST]).first().startswith(" ask not what your country")
    run.write([*ids(" ask not what your country can do for you."), FIRST + 200, END], done=True)
    assert run.begin().write([FIRST]).first().startswith(" Ask what you can")


def test_each_row_has_its_own_text() -> None:
    run = Run(TEXT, "Where is the station?", rows=2).write(" And", " Where")
    assert run.first(row=0).startswith(" so")
    assert run.first(row=1).startswith(" is the")
    run.drafter.select(run.state, torch.tensor([1]))
    assert run.first(row=0).startswith(" is the")
    both = Run(TEXT, rows=2).write(" And", " Ask")
    assert both.first(row=0).startswith(" so")


def test_a_plan_limits_the_tree() -> None:
    run = Run(TEXT.lower()).write(" And")
    assert run.paths(nodes=1, depth=1) == [" so"]
    assert len(run.paths(nodes=5, depth=2)) > 1
    assert len(run.paths(threshold=0.5)) == 1


@pytest.mark.parametrize("text", ["", " ", "...", "\n", "a", "語", "'", "-"])
def test_a_text_almost_without_words_drafts_almost_nothing(text: str) -> None:
    run = Run(text)
    for written in (" And", " a", ".", [FIRST], [FIRST]):
        assert len(run.write(written).paths()) < 16


def test_a_wrong_text_is_drafted_less_and_less() -> None:
    run = Run("wholly other words that nobody has said " * 20)
    before = len(run.write(" And").paths(threshold=0.3))
    assert before
    for _ in range(3):
        run.write(TEXT.replace("And", ""))
    assert not run.paths(threshold=0.3)


def test_incomplete_characters_are_held_back() -> None:
    run, tokens = Run("déjà vu encore"), ids(" déjà vu")
    for token in tokens:
        run.write([token])
        written = TOKENIZER.decode(run.state[0].tokens).rstrip("\ufffd")
        complete = [end for _, end in word_spans(written) if end < len(written)]
        assert run.state[0].rest == written[max(complete, default=0) :]
    assert run.first().startswith(" encore")


class Counted(list[str]):
    """Counts how often an item is looked up."""

    lookups = 0

    def __getitem__(self, at: Any) -> Any:
        self.lookups += 1
        return super().__getitem__(at)


def test_the_search_looks_at_few_words_of_a_long_text() -> None:
    rng = random.Random(0)
    words = Counted(f"word{rng.randrange(4000)}" for _ in range(100_000))
    follower = Follower[str](words)
    for at in range(0, 4000, 2):  # every second word is left out
        follower.add(words[at])
    for word in ("unknown", *words[70_000:70_004]):
        follower.add(word)
    assert follower.position == 70_004
    assert words.lookups < 2000 * 1000  # 2000 searches of the whole text would look up 100,000 each


def test_a_repeated_phrase_is_found_near_the_expected_place() -> None:
    text = "it was the age of wisdom it was the age of foolishness it was the epoch of belief"
    words = [text[begin:end] for begin, end in word_spans(text)]
    follower = Follower(words)
    for word in words[:8]:
        follower.add(word)
    follower.add("a")
    follower.add("age")
    assert follower.position == 10
    assert follower.place_of("of") == 11
    assert follower.position == 10


def test_marks_are_told_apart() -> None:
    kinds: Sequence[int] = [mark_kind(gap) for gap in (" ", "-", ", ", " \u2014 ", ". ", "?\n", "\u3002", '," ')]
    assert kinds == [NONE, NONE, COMMA, NONE, STOP, STOP, STOP, COMMA]
    assert word_key("Don\u2019t") == word_key("don't") == "dont"
    assert word_key("Stra\u00dfe") == "strasse"


def test_text_is_cleaned() -> None:
    assert clean_text("a\x00b\ud800c\u2028d\x1b[2J") == "a bc d [2J"


def test_subtitle_times_place_the_text() -> None:
    script = Script("one two three four", [(0, 1.0), (8, 5.0)])
    assert [script.place_at(seconds, 9.0) for seconds in (0.0, 1.2, 4.9, 5.4, 9.0)] == [0, 0, 2, 2, 4]
    assert Script("one two three four").place_at(4.5, 9.0) == 2
    assert not Script("").place_at(4.5, 9.0)
