"""The small vision-language model's training: its tokens, its rows, its layers and losses against naive references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mmdec.training.checkpoints import token_list
from mmdec.training.corpora.chats import Conversation
from mmdec.training.vlm.data import Rows, SceneData
from mmdec.training.vlm.export import mix
from mmdec.training.vlm.module import VlmModule, turn_weights
from mmdec.training.vlm.network import CellHeads, Shape, Whitening, build_model, cell_loss, see, speak
from mmdec.training.vlm.tokens import (
    ASSISTANT,
    BEGIN,
    END,
    IGNORED,
    IMAGE,
    NOWHERE,
    PAD,
    Batch,
    Encoded,
    answered,
    asked,
    build_tokenizer,
    encode,
    pack,
    patches_read,
    prefix,
    turn_mask,
)
from mmdec.types import InputError

TEXTS = [
    "What is this?",
    " A menu with SOUP for 12.50.",
    "Where is the red star?",
    " In the top left.",
    " It is 09:30.",
]
TINY = Shape(32, 16, 16, 2, 2, 24, 24, 3, 2, 12, 32, 256)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(TEXTS * 3, 300)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    vocabulary = tokenizer.get_vocab()
    made = build_model(TINY, sorted(vocabulary, key=vocabulary.__getitem__), 1).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)  # farther from uniform; with more the float32 of transformers' norms shows
    return made


def test_capitals_and_digits_are_spelled(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize(" SOUP 12.50")[:4] == ["ĠS", "O", "U", "P"]
    assert [piece.strip("Ġ") for piece in tokenizer.tokenize(" 12.50 09:30")] == list("12.5009:30")
    assert tokenizer.tokenize("The top") == tokenizer.tokenize("The") + tokenizer.tokenize(" top")
    for text in (*TEXTS, "é 3x ABc I am", "a\nb"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_parts_are_tokenized_as_the_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    question, answer = "Where is the red star?", "In the top left."
    said = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    chat = tokenizer.apply_chat_template(said, tokenize=False).replace(IMAGE, IMAGE * 4)  # type: ignore[union-attr]
    assert ids(chat) == ids(prefix(4)) + ids(asked(question)) + ids(answered(answer))
    opened = tokenizer.apply_chat_template(said[:1], tokenize=False, add_generation_prompt=True)
    assert opened == f"{BEGIN}USER: {IMAGE}\n{question} {ASSISTANT}"
    plain = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert tokenizer.apply_chat_template(plain, tokenize=False) == f"{BEGIN}USER: {question} ASSISTANT: {answer}{END}"


def test_layers_are_those_of_transformers(model: LlavaForConditionalGeneration) -> None:
    torch.manual_seed(0)
    pixels = torch.rand(2, 3, 32, 32, dtype=torch.float64) * 2 - 1
    tokens = torch.randint(6, 200, (2, 12))
    tokens[:, 2:6] = model.config.image_token_id  # type: ignore[index]
    with torch.no_grad():
        stock = model(input_ids=tokens, pixel_values=pixels).logits
        states = see(model, pixels, torch.float64)
        seen = model.model.multi_modal_projector(states)
        embeddings = model.get_input_embeddings()(tokens)
        embeddings = embeddings.masked_scatter((tokens == model.config.image_token_id)[..., None], seen)
        mask = turn_mask(torch.zeros(2, 12, dtype=torch.long), torch.float64)
        states, *_ = speak(model, embeddings, mask, torch.arange(12).expand(2, -1), torch.float64)
        own = model.lm_head(states)
    assert stock.std() > 0.1
    torch.testing.assert_close(own, stock, rtol=1e-6, atol=1e-6)  # transformers' norms compute in float32


def test_packed_turns_give_the_logits_of_each_turn_alone(model: LlavaForConditionalGeneration) -> None:
    draw = np.random.default_rng(0)
    lead = np.array([0, 4, *[3] * 4])
    turns = [
        (draw.integers(6, 200, 3 + n), draw.integers(6, 200, 2 + n), np.arange(2 + n, dtype=np.uint8) % 4)
        for n in range(4)
    ]
    tokens, labels, owners, positions, patches = (torch.from_numpy(x) for x in pack(lead, turns, 40, 2))
    pixels = torch.rand(1, 3, 32, 32, dtype=torch.float64) * 2 - 1

    def logits(row: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        embeddings = model.get_input_embeddings()(row[None])
        seen = model.model.multi_modal_projector(see(model, pixels, torch.float64))
        embeddings = embeddings.masked_scatter((row[None] == 3)[..., None], seen)
        return model.lm_head(speak(model, embeddings, mask, places[None], torch.float64)[0])[0]

    with torch.no_grad():
        packed = logits(tokens, turn_mask(owners[None], torch.float64), positions)
        for number, (question, answer, read) in enumerate(turns, 1):
            alone = torch.from_numpy(np.concatenate([lead, question, answer]))
            stock = model(input_ids=alone[None], pixel_values=pixels).logits[0, len(lead) :]
            torch.testing.assert_close(packed[owners == number], stock, rtol=1e-6, atol=1e-6)
            places = (owners == number) & (labels != IGNORED)
            assert labels[places].tolist() == answer.tolist()
            assert patches[places].tolist() == read.tolist()
            assert tokens[owners == number].tolist() == [*question, *answer]
    assert torch.isfinite(packed).all()  # padding, too


def test_rows_take_what_fits() -> None:
    lead = np.arange(4)
    turns = [
        (np.full(5, 7), np.full(5, 8), np.array([1, 2, NOWHERE, 3, NOWHERE])),
        (np.full(20, 9), np.full(1, 9), np.full(1, 9)),
        (np.full(2, 5), np.full(1, 6), np.full(1, 63)),
    ]
    tokens, labels, owners, positions, patches = pack(lead, turns, 18, 99)
    assert tokens.tolist() == [0, 1, 2, 3, *[7] * 5, *[8] * 5, 5, 5, 6, 99]
    assert owners.tolist() == [0] * 4 + [1] * 10 + [2] * 3 + [-1]
    assert positions.tolist() == [*range(14), 4, 5, 6, 0]
    assert labels.tolist() == [IGNORED] * 8 + [8] * 5 + [IGNORED] * 2 + [6] + [IGNORED] * 2
    read = {8: 1, 9: 2, 11: 3, 15: 63}  # beside the labels: what the next token reads
    assert patches.tolist() == [read.get(place, NOWHERE) for place in range(18)]


def test_cell_loss_is_a_weighted_mean() -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(2, 3, 8, 5), torch.randint(0, 5, (2, 3, 8))
    labels[0] = 0
    total, weights = 0.0, 0.0
    for score, label in zip(scores.reshape(-1, 5), labels.reshape(-1), strict=True):
        weight = 0.2 if label == 0 else 1.0
        total += weight * float(F.cross_entropy(score[None], label[None]))
        weights += weight
    assert float(cell_loss(scores, labels, 0.2)) == pytest.approx(total / weights, rel=1e-5)
    shown, colours = CellHeads(16, 8, (54, 11))(torch.randn(2, 4, 16))
    assert (shown.shape, colours.shape) == ((2, 4, 8, 54), (2, 4, 8, 11))


def test_a_run_starts_from_a_model_or_with_the_heads_of_a_checkpoint(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    units = token_list(tokenizer)
    earlier = VlmModule(units, TINY, seed=3)
    torch.save({"state_dict": earlier.state_dict()}, tmp_path / "last.ckpt")
    earlier.model.save_pretrained(tmp_path / "model")
    whole = VlmModule(units, TINY, seed=4, start=str(tmp_path / "last.ckpt")).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in earlier.state_dict().items())
    model_alone = VlmModule(units, TINY, seed=4, start=str(tmp_path / "model"))
    assert torch.equal(model_alone.model.lm_head.weight, earlier.model.lm_head.weight)
    assert not torch.equal(model_alone.pointer.weight, earlier.pointer.weight)
    projector = VlmModule(units, TINY, seed=4, start=str(tmp_path / "last.ckpt"), fresh_projector=True).state_dict()
    same = {name: torch.equal(value, projector[name]) for name, value in earlier.state_dict().items()}
    assert not all(same.values())
    assert all(fine or "projector" in name for name, fine in same.items())
    with pytest.raises(InputError, match="`start` must fit"):
        VlmModule(units, Shape(32, 16, 24, 2, 2, 24, 24, 3, 2, 12, 32, 256), start=str(tmp_path / "last.ckpt"))


def test_the_mean_of_two_models(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    units = token_list(tokenizer)
    earlier, later = (build_model(TINY, units, seed) for seed in (1, 2))
    earlier.save_pretrained(tmp_path / "model")
    before = {name: value.clone() for name, value in later.state_dict().items()}
    mix(later, tmp_path / "model", 0.25)
    for name, value in later.state_dict().items():
        torch.testing.assert_close(value, 0.75 * earlier.state_dict()[name] + 0.25 * before[name])
    assert later.lm_head.weight is later.get_input_embeddings().weight  # counted once
    with pytest.raises(InputError, match="`mean_with` must have"):
        mix(build_model(Shape(32, 16, 24, 2, 2, 24, 24, 3, 2, 12, 32, 256), units, 1), tmp_path / "model", 0.5)


PRINTS = [("SOUP", [8, 8, 9, 9]), ("4.50", [14, 14, 15, 15]), ("TEA", [16, 16, 17])]
_ = NOWHERE


def read(answer: str, prints: list[tuple[str, list[int]]]) -> list[int]:
    """The patch of each token: a character, with the space before it."""
    ends = [at + 1 for at, letter in enumerate(answer) if letter != " "]
    return patches_read(answer, list(zip([0, *ends], ends, strict=False)), prints).tolist()


def test_a_word_and_a_price_are_read_where_they_are_printed() -> None:
    #           S  O  U  P  i  s   4   .   5   0  .
    expected = [8, 8, 9, 9, _, _, 14, 14, 15, 15, _]
    assert read(" SOUP is 4.50.", PRINTS) == read("SOUP is 4.50.", PRINTS) == expected


def test_a_token_reads_its_first_character() -> None:
    tokens = [(0, 3), (3, 5), (5, 8), (8, 10), (10, 14)]
    assert patches_read(" SOUP is 4.50.", tokens, PRINTS).tolist() == [8, 9, _, 14, 14]


def test_what_is_printed_twice_is_left_out() -> None:
    for second in ("TEA", "TEA ROOM", "GREEN TEA"):
        prints = [*PRINTS, (second, [1] * len(second))]
        assert read(" TEA, not SOUP", prints) == [*[_] * 7, 8, 8, 9, 9], second
    assert read(" TEA", [*PRINTS, ("STEAM", [1] * 5), ("TEAS", [1] * 4)]) == [16, 16, 17]  # other words


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" Soup", [_] * 4),  # not as it is printed
        (" soup", [_] * 4),
        (" SOUPS", [_] * 5),
        (" 14.50", [_] * 5),
        (" 4.5", [_] * 3),
        (" A 3", [_, 5]),  # a letter alone is the article
        (" EXIT", [7, 7, _, _]),  # half of it lies outside the picture
        (" 09:30, B-7", [20, 20, 20, 21, 21, _, 30, 31, 31]),
        (" SOUP ROOM", [8, 8, 9, 9, _, _, _, _]),  # the second is not printed
    ],
)
def test_examples(answer: str, expected: list[int]) -> None:
    more = [("A", [3]), ("3", [5]), ("EXIT", [7, 7, -1, -1]), ("09:30", [20, 20, 20, 21, 21]), ("B-7", [30, 31, 31])]
    assert read(answer, [*PRINTS, *more]) == expected


def test_a_corpus_keeps_patches_beside_its_answers_tokens(tmp_path: Path) -> None:
    turns = (("What is 4.50?", "SOUP is 4.50."), ("Is it TEA?", "Yes."), ("Which TEA?", "It is TEA."))
    notes = {"prints": [["SOUP", [8, 8, 9, 9]], ["4.50", [14, 14, 15, 15]], ["TEA", [16, 16, 17]]]}  # as JSON has it
    talks = [
        Conversation("a", (Path("a.png"),), turns, notes),
        Conversation("b", (Path("b.png"),), (("What?", "SOUP."),), {}),  # a corpus without prints
    ]
    tokenizer = build_tokenizer([text for turn in turns for text in (asked(turn[0]), answered(turn[1]))] * 3, 400)
    path = tmp_path / "kept.npz"
    encode(talks, tokenizer).save(path)
    kept = Encoded.load(path)
    assert len(kept) == 2
    found = []
    for number, talk in enumerate(talks):
        for (question, answer), (first, second, patches) in zip(talk.turns, kept.turns(number), strict=True):
            assert first.tolist() == tokenizer(asked(question))["input_ids"]
            assert second.tolist() == tokenizer(answered(answer))["input_ids"]
            assert patches.shape == second.shape
            units = tokenizer.convert_ids_to_tokens(second.tolist())
            pairs = zip(units, patches.tolist(), strict=True)
            found.append([(unit, patch) for unit, patch in pairs if patch != NOWHERE])
    assert found == [
        [("ĠS", 8), ("O", 8), ("U", 9), ("P", 9), ("Ġ4", 14), (".", 14), ("5", 15), ("0", 15)],
        [],
        [("ĠT", 16), ("E", 16), ("A", 17)],
        [],
    ]
    everything = np.concatenate([patches for n in range(2) for *_, patches in kept.turns(n)])
    assert (kept.patches != NOWHERE).sum() == (everything != NOWHERE).sum()  # a question reads nothing


def test_pictures_with_print_are_a_share_of_a_pass(tmp_path: Path) -> None:
    rows = [
        {
            "id": number,
            "image": f"{number}.png",
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It says 5."}],
            "prints": [["5", [0]]] if number < 6 else [],
        }
        for number in range(20)
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")

    def order(share: float | None, lap: int = 0) -> list[int]:
        data = SceneData(str(tmp_path), str(tmp_path / "tokenizer"), pieces=300, patches=4, printed_share=share)
        return data.order(lap, data.lap_length()).tolist()

    assert sorted(order(None)) == list(range(20))
    assert sorted(order(1.0)) == list(range(6))
    for lap in range(3):
        taken = order(0.6, lap)
        assert set(range(6)) < set(taken)
        assert len(taken) == len(set(taken)) == 10
    assert set(order(0.6, 0)) != set(order(0.6, 1))  # other pictures without print in each pass
    assert len(order(0.1)) == 20  # no more than there are
    for wrong in (0.0, 1.5):
        with pytest.raises(InputError, match=f"`printed_share` must be above 0 and up to 1, but is {wrong}"):
            order(wrong)
    for row in rows:
        row["prints"] = []
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    assert sorted(order(0.6)) == list(range(20))  # a corpus without print is read whole


def test_questions_that_are_answered_by_reading_come_first(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    size, reading = 20, {3, 8, 15}
    tokens = np.repeat(np.arange(10, 10 + size, dtype=np.uint16), 2)  # a question and an answer of one token each
    patches = np.full(2 * size, NOWHERE, np.uint8)
    patches[[2 * turn + 1 for turn in reading]] = 1
    bounds = np.arange(2 * size).reshape(size, 2) + 1
    encoded = Encoded(tokens, patches, bounds, np.array([0, size]), np.array([str(tmp_path / "a.png")]))

    def asked(prefer: float, seed: int) -> list[int]:
        rows = Rows(encoded, np.zeros((1, 4, 8, 2), np.uint8), 32, np.arange(4), 10, 2, prefer)
        return [token - 10 for token in rows[0, seed][1][4::2].tolist()]

    assert all(set(asked(1.0, seed)) == reading for seed in range(5))  # three questions fit
    share = [sum(len(reading & set(asked(prefer, seed))) for seed in range(100)) for prefer in (0.0, 0.5)]
    assert 25 < share[0] < 65  # of 300: as drawn it is three of twenty
    assert 1.4 * share[0] < share[1] < 250
    assert asked(0.5, 7) == asked(0.5, 7) != asked(0.5, 8)


SHAPE = Shape(32, 16, 16, 2, 2, 24, 24, 3, 2, 12, 32, 256)  # three layers of two heads of 12
UNITS = [BEGIN, END, PAD, IMAGE, *(f"word{number}" for number in range(36)), "ĠB", "A", "7", "Ġ"]
B, A, SEVEN, SPACE = range(40, 44)
LEAD = np.array([0, 5, 3, 3, 3, 3, 6])  # the picture's four patches are tokens 2 to 5
READ = [[0, NOWHERE, 3, 2], [1, 1, NOWHERE, NOWHERE]]  # by the tokens of each row's answer


def module(guided: tuple[int, ...], **more: Any) -> VlmModule:
    """Its projector measured on `batch`, and folded: the model is the one that transformers knows."""
    made = VlmModule(UNITS, SHAPE, guided=guided, half=False, **more)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(2)
        made.losses(batch(READ), False)
    made.whitening.fold(made.model.model.multi_modal_projector.linear_1)
    return made


def batch(read: list[list[int]]) -> Batch:
    """Two rows of one question each, without padding: every token sees all before it, as in transformers."""
    draw = np.random.default_rng(0)
    rows = [pack(LEAD, [(draw.integers(7, 40, 5), draw.integers(7, 40, 4), np.array(row))], 16, 2) for row in read]
    columns = [torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)]
    pixels = torch.from_numpy(draw.integers(0, 255, (2, 3, 32, 32)).astype(np.uint8))
    return Batch(pixels, *columns, cells=torch.ones(2, 4, 8, 2, dtype=torch.uint8))


def naive(made: VlmModule, rows: Batch, guided: tuple[int, ...]) -> Tensor:
    """From the attention that transformers returns, token by token."""
    stock: Any = made.model
    seen = stock(input_ids=rows.tokens, pixel_values=rows.pixels.float() / 127.5 - 1, output_attentions=True).attentions
    losses = [
        -seen[layer][row, 0, len(LEAD) + 5 - 1 + at, 2 + patch].log()  # looks where the token before it stands
        for layer in guided
        for row, answer in enumerate(READ)
        for at, patch in enumerate(answer)
        if patch != NOWHERE
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("guided", [(0,), (1,), (0, 2)])
def test_the_loss_is_that_of_transformers_attention(guided: tuple[int, ...]) -> None:
    made, rows = module(guided), batch(READ)
    parts = made.losses(rows, False)
    made.whitening.fold(made.model.model.multi_modal_projector.linear_1)  # as after each step
    expected = naive(made, rows, guided)
    assert abs(expected.item() - np.log(13)) > 1e-3  # no even look
    torch.testing.assert_close(parts["guide"], expected, rtol=1e-5, atol=1e-5)
    whole = parts["answers"] + 0.3 * parts["cells"] + 0.3 * (parts["guide"] + parts["pointer"])
    torch.testing.assert_close(parts["loss"], whole)


def test_the_gradient_goes_through_the_first_head_alone() -> None:
    made = module((1,))
    made.losses(batch(READ), False)["guide"].backward()
    below, guided, above = made.model.model.language_model.layers
    for part in (guided.self_attn.q_proj, guided.self_attn.k_proj):
        assert (part.weight.grad[:12].abs().sum(1) > 0).all()
        assert (part.weight.grad[12:] == 0).all()
    assert (guided.input_layernorm.weight.grad != 0).any()
    for part in (guided.self_attn.v_proj, guided.self_attn.o_proj, guided.mlp.up_proj, *above.modules()):
        assert getattr(part, "weight", None) is None or part.weight.grad is None
    for parameter in below.parameters():  # what the guided layer reads was made there, by all of it
        assert (parameter.grad != 0).any()
    tower = made.model.model.vision_tower.encoder.layers[0]
    assert (tower.self_attn.q_proj.weight.grad != 0).any()


def test_a_step_against_the_gradient_looks_closer() -> None:
    made, rows = module((1,)), batch(READ)
    before = made.losses(rows, False)["guide"]
    before.backward()
    with torch.no_grad():
        for parameter in made.model.model.language_model.layers[1].self_attn.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad / parameter.grad.norm()
    assert made.losses(rows, False)["guide"] < before


def test_rows_that_read_nothing_cost_nothing() -> None:
    made = module((1,))
    parts = made.losses(batch([[NOWHERE] * 4] * 2), False)
    assert parts["guide"].item() == 0
    parts["loss"].backward()
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters() if p.grad is not None)


def test_without_weight_nothing_is_watched() -> None:
    plain = module((), guide_weight=0.3).losses(batch(READ), False)
    off = module((1,), guide_weight=0.0).losses(batch(READ), False)
    assert "guide" not in plain
    assert "guide" not in off
    assert torch.equal(plain["loss"], off["loss"])


def test_the_pointer_is_taught_the_cell_of_the_character_that_is_read() -> None:
    made, rows = module((0, 2)), batch([[0, 3, 3, 1], [2, 2, 2, NOWHERE]])
    first = len(LEAD) + 5 - 1  # where the token before the answer stands
    rows.labels[0, first : first + 4] = torch.tensor([B, A, SEVEN, SPACE])
    rows.labels[1, first : first + 3] = torch.tensor([SEVEN, A, 9])
    rows.cells[..., 0] = 0
    a, b, seven = 1, 2, 27 + 7  # letters, then digits: the kinds of cells
    rows.cells[0, 0, 5, 0] = b
    rows.cells[0, 3, :2, 0] = a  # twice: it could be either
    rows.cells[0, 3, 6, 0] = seven
    rows.cells[0, 1, 1:, 0] = a  # of a patch that is read by a space, one cell is empty
    rows.cells[1, 2, 3, 0], rows.cells[1, 2, 4, 0] = a, seven
    states = torch.randn(2, rows.tokens.shape[1], 24)
    wanted = {(0, 0): 5, (0, 2): 6, (1, 0): 4, (1, 1): 3}
    losses, right = [], []
    for (row, at), cell in wanted.items():
        state = states[row, first + at]
        scores = made.pointer(state / state.square().mean().sqrt())
        losses.append(-scores.log_softmax(-1)[cell])
        right.append(float(scores.argmax() == cell))
    loss, share = made.pointer_loss(states, rows)
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-5)
    assert share.item() == pytest.approx(np.mean(right))


def test_a_whitened_projector_is_the_plain_one() -> None:
    torch.manual_seed(0)
    states = torch.randn(40, 4, 16).double() @ torch.randn(16, 16).double() + 3  # far from white
    whitening, plain = Whitening(16, 24).double(), torch.nn.Linear(16, 24).double()
    assert not whitening.measured
    whitening.measure(states, plain)
    assert whitening.measured
    torch.testing.assert_close(whitening(states), plain(states))  # goes on from a layer that was trained
    white = ((states - whitening.middle) @ whitening.turn).flatten(0, 1)
    torch.testing.assert_close(white.mean(0), torch.zeros(16).double(), rtol=0, atol=1e-8)
    before, after = (torch.linalg.eigvalsh(part.flatten(0, 1).T.cov(correction=0)) for part in (states, white[None]))
    torch.testing.assert_close(after, before / (before + 0.01 * before.mean()))  # 1 but where there is next to nothing
    assert float(after[-1] / after[0]) < 0.1 * float(before[-1] / before[0])
    with torch.no_grad():
        whitening.first.weight.normal_()
        whitening.first.bias.normal_()
    whitening.fold(plain)
    torch.testing.assert_close(plain(states), whitening(states))


def test_only_layers_that_are_there_are_guided() -> None:
    for wrong in ((3,), (-1, 0)):
        with pytest.raises(InputError, match="`guided` must be numbers of layers from 0 to 2"):
            module(wrong)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_an_answer_s_weight_is_by_its_length(power: float) -> None:
    turns = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, -1]])
    asked = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    lengths = torch.tensor([3.0, 3.0, 3.0, 1.0, 2.0, 2.0])  # of the answer of each column that counts
    assert torch.allclose(turn_weights(turns, asked, power), lengths**-power)
