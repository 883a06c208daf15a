"""The small vision-language model's training: its tokens, its rows, its layers and losses against naive references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mmdec.checks.errors import InputError
from mmdec.training.options import token_list
from mmdec.training.vlm.export import mix
from mmdec.training.vlm.module import VlmModule
from mmdec.training.vlm.network import CellHeads, Shape, build_model, cell_loss, see, speak
from mmdec.training.vlm.tokens import (
    ASSISTANT,
    BEGIN,
    END,
    IGNORED,
    IMAGE,
    NOWHERE,
    answered,
    asked,
    build_tokenizer,
    pack,
    prefix,
    turn_mask,
)

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
