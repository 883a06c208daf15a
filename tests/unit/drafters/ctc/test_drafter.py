"""Tests CTC drafts: the alignment against all paths, the draft after it, timestamps, files."""

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mmdec
from mmdec.drafters.ctc.checkpoint import CtcTokenIds, load_ctc, read_ctc, save_ctc, token_merges
from mmdec.drafters.ctc.drafter import (
    MAX_FRAME_COST,
    MAX_WORD,
    SILENCE_STATES,
    Alignment,
    CtcDrafter,
    CtcRow,
    CtcState,
    MultilingualCtcDrafter,
    state_lengths,
)
from mmdec.drafters.ctc.network import BLANK, CtcHead, CtcHeadConfig
from mmdec.drafters.ctc.tokens import FIRST_PIECE, SEGMENT_END, Merges, TokenPieces, choose_vocabulary
from mmdec.drafters.ctc.training.measure import ctc_token_ids
from mmdec.drafters.ctc.training.ngram import count_ngram
from mmdec.errors import InputError
from mmdec.nn.int8 import SCALE_SUFFIX
from mmdec.phonetics.ngram import NGram
from mmdec.phonetics.piece_ngram import PieceNGram
from mmdec.pretrained.drafters import load_drafter
from mmdec.types import Context, Draft, EncoderContext, Plan, Scores, Verdict
from mmdec.whisper.checkpoint import load_whisper
from tests.support.tiny_whisper import EOT, TIMESTAMPS, VOCABULARY, whisper, write
from tests.support.whisper_calls import ctc


def collapsed(path: tuple[int, ...]) -> list[int]:
    return [piece for piece, _ in itertools.groupby(path) if piece != BLANK]


@pytest.mark.parametrize("seed", range(6))
def test_the_alignment_is_the_best_of_all_paths(seed: int) -> None:
    """The text goes on from the frame where the best path through all frames, text first, leaves it."""
    draw = np.random.default_rng(seed)
    frames, size = 6, 3
    logprobs = np.log(draw.dirichlet(np.full(size, 0.4), frames) + 1e-9)
    costs = np.maximum(logprobs - logprobs.max(1, keepdims=True), -MAX_FRAME_COST)
    text = draw.integers(1, size, 3).tolist()
    alignment = Alignment(logprobs)
    for count in range(4):
        if count:
            alignment.add(text[count - 1])
        scores = {
            place: max(
                (
                    sum(costs[frame, piece] for frame, piece in enumerate(path))
                    for path in itertools.product(range(size), repeat=place)
                    if collapsed(path) == text[:count]
                ),
                default=-np.inf,
            )
            for place in range(frames + 1)
        }
        best = max(scores.values())
        assert alignment.place() == max(place for place, score in scores.items() if score > best - 1e-4)


def logprobs_of_path(path: list[int], size: int, sure: float = 0.9) -> np.ndarray:
    """Log-probabilities of a path that is heard."""
    table = np.full((len(path), size), (1 - sure) / (size - 1))
    table[np.arange(len(path)), path] = sure
    return np.log(table)


def drafter(ngram: PieceNGram | None = None) -> CtcDrafter:
    """Hears the bytes a to z, and "the" as a piece of its own."""
    alphabet = [{32: 0}.get(value, value - 96 if 97 <= value <= 122 else -1) for value in range(256)]
    t, h, e = 20, 8, 5
    merges = Merges([(t, h, 40), (0, 40, 41), (41, e, 42), (40, e, 43)], alphabet)
    pieces = TokenPieces(merges, [*range(27), 43])
    return CtcDrafter(CtcHead(CtcHeadConfig(32, len(pieces), 1, 16, 1, 3)), pieces, TIMESTAMPS, EOT, ngram=ngram)


def grow(made: CtcDrafter, logprobs: np.ndarray, accepted: list[int], plan: Plan, timed: bool = False) -> Draft:
    """The draft after some accepted tokens."""
    state = CtcState([CtcRow(made, timed, TIMESTAMPS, alignment=Alignment(logprobs))])
    if accepted:
        tokens = torch.tensor([accepted])
        verdict = Verdict(tokens, tokens[:, -1], tokens[:, -1] < 0, tokens, torch.tensor([len(accepted)]))
        made.update(state, Draft(tokens, tokens, torch.tensor([1])), Scores(torch.zeros(1, 1, 1)), verdict)
    return made.propose(state, torch.zeros(1, dtype=torch.long), plan)


def run(made: CtcDrafter, path: list[int], accepted: list[int], nodes: int = 12, timed: bool = False) -> list[int]:
    """The draft's only path."""
    draft = grow(made, logprobs_of_path(path, len(made.pieces)), accepted, Plan(nodes, nodes), timed)
    assert draft.parents[0, 1:].tolist() == [*range(len(draft.parents[0]) - 1)]
    return draft.tokens[0, 1:].tolist()


def test_drafts_are_in_the_models_own_tokens() -> None:
    made = drafter()
    space, t, h, e, a = (made.pieces.of_token(number)[0] for number in (0, 20, 8, 5, 1))
    path = [0, 0, a, a, 0, space, t, h, h, e, 0, 0]  # "a the", in letters
    assert run(made, path, [1]) == [42, EOT]  # after "a"
    assert run(made, path, [1, 41]) == [5, EOT]  # after "a th"
    assert run(made, path, [1, 42]) == [EOT]
    assert run(made, path, [1, 0, 19, 42]) == [EOT]  # "s", which was not heard, is passed over
    assert run(made, path, [1], nodes=1) == [42]


def test_rows_of_a_language_that_the_head_does_not_know_are_left_alone() -> None:
    made = ctc("babbling")
    made.languages = frozenset([7])
    tokens = torch.tensor([[3, 7, TIMESTAMPS - 1], [3, 8, TIMESTAMPS - 1]])
    positions = torch.arange(3).expand(2, -1)
    states = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    state = made.start(
        Context(tokens, tokens >= 0, positions[None], positions[:, -1] + 1, encoder=EncoderContext(states))
    )
    draft = made.propose(state, torch.zeros(2, dtype=torch.long), Plan(4, 4))
    assert draft.size.tolist() == [5, 1]
    made.select(state, torch.tensor([1]))
    assert made.propose(state, torch.zeros(1, dtype=torch.long), Plan(4, 4)).size.tolist() == [1]


def test_each_row_is_drafted_by_the_head_of_its_language() -> None:
    """Rows of the first head's language, of the second's, of both, of none."""
    made = [ctc("babbling", seed) for seed in (0, 1)]
    made[0].languages, made[1].languages = frozenset([7, 9]), frozenset([8, 9])
    both, languages = MultilingualCtcDrafter(made), [7, 8, 9, 10]
    tokens = torch.tensor([[3, language, TIMESTAMPS - 1] for language in languages])
    positions = torch.arange(3).expand(4, -1)
    states = torch.randn(4, 40, 32, generator=torch.Generator().manual_seed(0))
    context = Context(tokens, tokens >= 0, positions[None], positions[:, -1] + 1, encoder=EncoderContext(states))
    memory, apart = both.start(context), [drafter.start(context) for drafter in made]
    which = [0, 1, 0, 0]
    accepted = torch.tensor([[4, 5], [6, -1], [4, 5], [7, -1]])
    verdict = Verdict(accepted, accepted[:, 0], accepted[:, 0] < 0, accepted, torch.tensor([2, 1, 2, 1]))
    roots, scores = torch.zeros(4, dtype=torch.long), Scores(torch.zeros(1, 1, 1))
    for plan in (Plan(4, 4), Plan(0, 0), Plan(6, 3, threshold=0.1)):
        draft = both.propose(memory, roots, plan)
        single = [drafter.propose(state, roots, plan) for drafter, state in zip(made, apart, strict=True)]
        for row, head in enumerate(which):
            size = int(draft.size[row])
            assert size == int(single[head].size[row])
            assert torch.equal(draft.tokens[row, :size], single[head].tokens[row, :size])
        assert (draft.size.tolist() == [5, 5, 5, 1]) == (plan == Plan(4, 4))
        both.update(memory, draft, scores, verdict)
        for drafter, state, own in zip(made, apart, single, strict=True):
            drafter.update(state, own, scores, verdict)
    live = torch.tensor([1, 2])
    both.select(memory, live)
    made[1].select(apart[1], live)
    draft = both.propose(memory, roots[:2], Plan(4, 4))
    single = made[1].propose(apart[1], roots[:2], Plan(4, 4))
    size = int(draft.size[0])
    assert torch.equal(draft.tokens[0, :size], single.tokens[0, :size])
    made[0].select(apart[0], live)
    single = made[0].propose(apart[0], roots[:2], Plan(4, 4))
    size = int(draft.size[1])
    assert torch.equal(draft.tokens[1, :size], single.tokens[1, :size])
    assert both.name == f"{made[0].name}+{made[1].name}"


def test_a_refused_task_gets_no_drafts_and_no_row_is_heard_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two heads have one language, the first drafts its rows, except those that translate."""
    made = [ctc("babbling", seed) for seed in (0, 1)]
    for drafter in made:
        drafter.languages, drafter.refused = frozenset([7]), frozenset([9])
    heard: list[tuple[CtcDrafter, int]] = []
    monkeypatch.setattr(
        CtcDrafter,
        "_listen",
        lambda self, states, read: [heard.append((self, window)) or np.zeros((3, 9)) for window in read],
    )
    tokens = torch.tensor([[3, 7, 8], [3, 7, 9], [3, 6, 8]])
    positions = torch.arange(3).expand(3, -1)
    context = Context(
        tokens, tokens >= 0, positions[None], positions[:, -1] + 1, encoder=EncoderContext(torch.zeros(3, 40, 32))
    )
    memory = MultilingualCtcDrafter(made).start(context)
    assert heard == [(made[0], 40)]
    assert [row.alignment is not None for row in memory.rows] == [True, False, False]


@pytest.mark.parametrize("last", [300, 70_000], ids=["16 bits", "32 bits"])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_stored_tokenizer_tables_are_read_unchanged(last: int, rows: int, tmp_path: Path) -> None:
    """Merged ids that are consecutive or not; a byte's id that is larger than all others; no merges at all."""
    alphabet = [*range(255), last]
    merges = Merges([(0, last, 400), (1, 400, 401), (2, 401, 450)][:rows], alphabet)
    made = ctc("random")
    pieces = TokenPieces(merges, sorted({*range(29), last}))
    tokens = CtcTokenIds(TIMESTAMPS, EOT, 70_001, "somebody/whisper", [7], [9])
    _, result, read, ngram = read_ctc(save_ctc(tmp_path / "ctc", made.head, pieces, tokens))
    assert ngram is None
    assert (result.merges.rows, result.merges.alphabet, result.token_ids) == (merges.rows, alphabet, pieces.token_ids)
    assert read.refused == [9]


@pytest.mark.parametrize(("codes", "refused"), [(["fr"], ["translate"]), (["en", "fr"], []), ([], [])])
def test_a_head_without_english_refuses_translations(codes: list[str], refused: list[str], tmp_path: Path) -> None:
    whole = load_whisper(write(tmp_path / "whisper", with_heads=False))
    settings = whole.model.generation_config
    settings.lang_to_id = {**settings.lang_to_id, "<|fr|>": 5}
    assert ctc_token_ids(whole, "", codes).refused == [settings.task_to_id[name] for name in refused]


def test_a_head_reads_the_sound_and_some_silence() -> None:
    """A window of 30 s, with 2 s of sound in one row and 29.5 s in the other, the rest padded."""
    sound = torch.zeros(2, 80, 3000)
    sound[0, 3, :200], sound[1, 3, :2950] = 1.0, 1.0
    states = torch.zeros(2, 1500, 1)
    assert state_lengths(states, sound) == [100 + SILENCE_STATES, 1500]
    assert state_lengths(states, None) == [1500, 1500]


def test_segments_end_where_a_mark_is_heard() -> None:
    made = drafter()
    a, e, space = (made.pieces.of_token(number)[0] for number in (1, 5, 0))
    path = [0, a, 0, SEGMENT_END, SEGMENT_END, 0, space, e, 0, 0]  # a frame is 0.02 s here
    first, last = TIMESTAMPS + 3, TIMESTAMPS + 7
    assert run(made, path, [1], timed=True) == [first, first, 0, 5, last, EOT]
    assert run(made, path, [1, TIMESTAMPS + 5], timed=True) == [TIMESTAMPS + 5, 0, 5, last, EOT]
    assert run(made, path, [1, TIMESTAMPS + 5, TIMESTAMPS + 5], timed=True) == [0, 5, last, EOT]
    assert run(made, path, [1]) == [0, 5, EOT]


def test_the_last_segment_ends_at_a_whole_second_or_where_it_is_heard() -> None:
    made = drafter()
    a, e, space = (made.pieces.of_token(number)[0] for number in (1, 5, 0))
    path = [a, *[0] * 50, space, e, *[0] * 40]  # the last piece at 1.04 s, in 1.86 s
    draft = grow(made, logprobs_of_path(path, len(made.pieces)), [1], Plan(5, 9), timed=True)
    # 2 s is beyond the window
    assert draft.tokens[0, 1:].tolist() == [0, 5, TIMESTAMPS + 50, EOT, TIMESTAMPS + 52]
    assert draft.parents[0, 1:].tolist() == [0, 1, 2, 3, 2]


def test_a_misheard_word_is_dropped_to_its_end() -> None:
    made = drafter()
    space, s, t, e, a = (made.pieces.of_token(number)[0] for number in (0, 19, 20, 5, 1))
    path = [space, s, t, 0, space, a, 0, 0]  # " st a"
    assert run(made, path, [0, 19]) == [20, 0, 1, EOT]
    # " e" for " s": no "t" will follow, or else it was only the beginning that was misheard
    draft = grow(made, logprobs_of_path(path, len(made.pieces)), [0, 5], Plan(12, 12))
    assert draft.tokens[0, 1:].tolist() == [0, 1, EOT, 20, 0, 1, EOT]
    assert draft.parents[0, 1:].tolist() == [0, 1, 2, 0, 4, 5, 6]
    path = [0, e, 0, SEGMENT_END, 0, e, t, space, a, 0]
    assert run(made, path, [5, TIMESTAMPS + 5, TIMESTAMPS + 5], timed=True)[:2] == [0, 1]  # words begin with a space


def test_a_draft_ends_where_the_head_is_unsure() -> None:
    made = drafter()
    space, a, e = (made.pieces.of_token(number)[0] for number in (0, 1, 5))
    sure, unsure = logprobs_of_path([a, 0, space], 30), logprobs_of_path([e, 0], 30, 0.3)
    logprobs = np.concatenate([sure, unsure])
    assert grow(made, logprobs, [], Plan(9, 9, threshold=0.5)).tokens[0, 1:].tolist() == [1]
    assert grow(made, logprobs, [], Plan(9, 9)).size.item() > 2
    assert grow(made, logprobs, [], Plan(0, 0)).size.tolist() == [1]


def mixed(path: list[int], rivals: dict[int, tuple[int, float]]) -> np.ndarray:
    """Log-probabilities of a path of which some frames have a rival: frame -> (its piece, its probability)."""
    table = np.exp(logprobs_of_path(path, 30))
    for frame, (piece, probability) in rivals.items():
        table[frame] *= (1 - probability) / (1 - table[frame, piece])
        table[frame, piece] = probability
    return np.log(table)


def test_rivals_of_a_word_are_its_siblings() -> None:
    made = drafter()
    space, a, e, h, t = (made.pieces.of_token(number)[0] for number in (0, 1, 5, 8, 20))
    path = [space, a, 0, space, t, 0, 0]  # " a t", perhaps " e t"
    draft = grow(made, mixed(path, {1: (e, 0.4)}), [], Plan(5, 4))
    assert draft.tokens[0, 1:].tolist() == [0, 1, 0, 20, 5]
    assert draft.parents[0, 1:].tolist() == [0, 1, 2, 3, 1]
    assert run(made, path, [], nodes=4) == [0, 1, 0, 20]
    after = grow(made, mixed(path, {1: (e, 0.4)}), [0, 5], Plan(2, 2))  # the rival was right
    assert after.tokens[0, 1:].tolist() == [0, 20]
    hidden = grow(made, mixed(path, {2: (h, 0.3)}), [], Plan(5, 4))  # among blanks: " ah"
    assert hidden.tokens[0, 1:].tolist() == [0, 1, 0, 20, 8]
    assert hidden.parents[0, 1:].tolist() == [0, 1, 2, 3, 2]


def test_the_ngram_chooses_among_what_was_heard() -> None:
    made = drafter()
    space, a, h, t = (made.pieces.of_token(number)[0] for number in (0, 1, 8, 20))
    texts = [[str(piece) for piece in (space, t, h)]] * 20 + [[str(piece) for piece in (a, a)]] * 20
    model = NGram.build(texts, order=2, vocabulary=map(str, range(len(made.pieces))))
    knows = drafter(PieceNGram.pack(model, len(made.pieces)))
    assert knows.name != made.name
    path = [space, t, a, space, a, 0]
    unsure = mixed(path, {2: (h, 0.4)})
    assert grow(made, unsure, [], Plan(1, 1)).tokens[0, 1:].tolist() == [0]  # " ta"
    assert grow(knows, unsure, [], Plan(1, 1)).tokens[0, 1:].tolist() == [41]  # " th"
    assert grow(knows, mixed(path, {}), [], Plan(1, 1)).tokens[0, 1:].tolist() == [0]  # it cannot change what is sure


def test_a_text_without_spaces_is_drafted_in_parts() -> None:
    made = drafter()
    letters = [made.pieces.of_token(number)[0] for number in (1, 5)] * 20
    assert run(made, letters, [], nodes=40)[:MAX_WORD] == [1, 5] * (MAX_WORD // 2)


def test_every_token_can_be_spelt_and_merged_again() -> None:
    made = ctc("random")
    merges = made.pieces.merges
    for token in range(60):
        content = b"".join(made.pieces.bytes(piece) for piece in made.pieces.of_token(token))
        spelt = all(part in made.pieces.token_ids for part in leaves(merges, token))
        assert not spelt or content == merges.bytes(token)


def leaves(merges: Merges, token: int) -> list[int]:
    return [leaf for part in merges.parts[token] for leaf in leaves(merges, part)] if token in merges.parts else [token]


def test_rare_tokens_are_taken_apart() -> None:
    merges = drafter().pieces.merges
    texts = [[1, 42]] * 5 + [[43]]
    assert choose_vocabulary(texts, merges, 256, min_count=1) == [1, 42, 43]
    assert choose_vocabulary(texts, merges, 256, min_count=3) == [1, 5, 8, 20, 42]  # "the" is t, h and e
    assert choose_vocabulary(texts, merges, 256, min_count=99) == [0, 1, 5, 8, 20]


def test_a_folder_drafts_only_for_its_model(tmp_path: Path) -> None:
    made, model = ctc("random"), whisper()
    tokens = CtcTokenIds(TIMESTAMPS, EOT, VOCABULARY, "somebody/whisper", [7])
    folder = save_ctc(tmp_path / "ctc", made.head, made.pieces, tokens, trained="Trained on nothing.")
    result = load_drafter(folder, model)
    assert isinstance(result, CtcDrafter)
    assert result.pieces.token_ids == made.pieces.token_ids
    assert result.languages == {7}
    assert result.pieces.merges.rows == made.pieces.merges.rows
    for name, value in made.head.state_dict().items():
        torch.testing.assert_close(result.head.state_dict()[name], value, rtol=0.02, atol=0.05)
    ngram = count_ngram([made.pieces.bytes(piece).decode() for piece in (3, 4, 5, 4, 5)], made.pieces, (9, 9))
    known = save_ctc(tmp_path / "known", *read_ctc(folder)[:3], ngram)
    again = save_ctc(tmp_path / "again", *read_ctc(known))
    assert (again / "model.safetensors").read_bytes() == (known / "model.safetensors").read_bytes()
    drafts_with = load_ctc(known, model).ngram
    assert drafts_with is not None
    assert [drafts_with.after((3,))(piece) for piece in range(9)] == [ngram.after((3,))(piece) for piece in range(9)]
    with pytest.raises(InputError, match=r"`model` must have 32 channels .* somebody/whisper"):
        load_ctc(folder, whisper(d_model=48))
    config = json.loads((folder / "config.json").read_text())
    for damage in ({"head": {**config["head"], "pieces": 9}}, {"tokens": {}}, {"system": "medusa"}):
        (folder / "config.json").write_text(json.dumps({**config, **damage}))
        with pytest.raises(InputError):
            read_ctc(folder)
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / "model.safetensors")
    name = next(iter(made.head.state_dict()))
    save_file({**state, name + SCALE_SUFFIX: torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(InputError, match="`directory` must hold int8 rows"):
        read_ctc(folder)


@pytest.mark.parametrize("timestamps", [None, "segment"])
def test_transcribe_finds_the_drafter_in_the_models_folder(tmp_path: Path, timestamps: str | None) -> None:
    folder = write(tmp_path / "whisper", with_heads=False)
    recording = 0.1 * torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    options = {"sample_rate": 16000, "model": folder, "language": "en", "timestamps": timestamps}
    with pytest.raises(InputError, match="`drafter` must have weights for this model, but 'ctc' has none"):
        mmdec.transcribe(recording, drafter="ctc", **options)
    whole = load_whisper(folder)
    merges = token_merges(whole.tokenizer)
    pieces = TokenPieces(merges, [token for token in (*merges.alphabet, *sorted(merges.parts)) if token >= 0])
    torch.manual_seed(0)
    head = CtcHead(CtcHeadConfig(whole.model.config.d_model, FIRST_PIECE + len(pieces.token_ids), 2, 16, 1, 3))
    torch.nn.init.normal_(head.output.weight)
    save_ctc(folder / "ctc", head, pieces, ctc_token_ids(whole))
    drafted = mmdec.transcribe(recording, drafter="ctc", num_speculative_tokens=4, **options)
    plain = mmdec.transcribe(recording, drafter=None, **options)
    assert drafted.text == plain.text
    assert drafted.segments == plain.segments
    by_folder = mmdec.transcribe(recording, drafter=folder / "ctc", num_speculative_tokens=4, **options)
    assert by_folder.text == plain.text


def test_shipped_drafters_can_be_sent_to_another_process() -> None:
    model = load_whisper("whisper-tiny.en").model
    drafter = mmdec.load_drafter("whisper-tiny.en/ctc", model)
    assert pickle.loads(pickle.dumps(drafter)).name == drafter.name
