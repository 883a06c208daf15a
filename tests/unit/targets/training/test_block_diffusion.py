"""Training of masked diffusion models: a step predicts what decoding will predict, and the list tasks are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdec.errors import InputError
from mmdec.targets.masked_diffusion import open_session
from mmdec.targets.training.block_diffusion import (
    LIST_TASKS,
    MASK,
    SPECIAL_UNITS,
    BlockDiffusionModule,
    CanvasBatch,
    ListTasks,
    OwnTexts,
)
from tests.support.lightning_warnings import LIGHTNING
from tests.support.tiny_text import language_model

pytestmark = LIGHTNING
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
UNITS = [*map(str, range(20)), MASK]


@pytest.mark.parametrize("visible", ["block", "full"])
@pytest.mark.parametrize("prompt", [1, 3, 6])
@torch.inference_mode()
def test_training_predicts_as_decoding_does(visible: str, prompt: int) -> None:
    module = BlockDiffusionModule(UNITS, sizes=SIZES, visible=visible, block_length=4).double().eval()
    draws = torch.Generator().manual_seed(prompt)
    tokens = torch.randint(20, (2, prompt + 12), generator=draws)
    hidden = torch.rand(2, 12, generator=draws) < 0.5
    noisy = tokens[:, prompt:].masked_fill(hidden, 20)
    if visible == "full":  # decoding reveals one block after another: those before it are clean, those after it masks
        noisy[:, :4], noisy[:, 8:] = tokens[:, prompt : prompt + 4], 20
    logits = module.predict(CanvasBatch(tokens, prompt), noisy)
    for row in range(2):
        session: Any = open_session(module.model, module.layout, tokens[row, :prompt], 3)
        for start in (0, 4, 8):
            score = session.score(noisy[row : row + 1, start : start + 4])
            if visible == "block" or start == 4:
                torch.testing.assert_close(score[0], logits[row, start : start + 4], rtol=1e-9, atol=1e-9)
            session.commit(tokens[row, prompt + start : prompt + start + 4])


def test_loss_counts_hidden_tokens_only() -> None:
    module = BlockDiffusionModule(UNITS, sizes=SIZES, block_length=4).eval()
    tokens = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(0))
    loss = module.loss(CanvasBatch(tokens, 1), torch.Generator().manual_seed(1))
    draws = torch.Generator().manual_seed(1)
    share = torch.rand(3, 2, 1, generator=draws)
    hidden = (torch.rand(3, 2, 4, generator=draws) < share).flatten(1)
    logprobs = module.predict(CanvasBatch(tokens, 1), tokens[:, 1:].masked_fill(hidden, 20)).log_softmax(-1)
    picked = [-logprobs[row, at, tokens[row, at + 1]] for row, at in hidden.nonzero().tolist()]
    assert 0 < len(picked) < 24
    torch.testing.assert_close(loss, torch.stack(picked).mean())


def test_the_models_configuration_names_mask_and_block() -> None:
    config: Any = BlockDiffusionModule(UNITS, sizes=SIZES, block_length=4).model.config
    assert (config.mask_token_id, config.block_length, config.vocab_size) == (20, 4, 21)


def test_list_tasks_hold_right_answers() -> None:
    data = ListTasks(items=10, shortest=3, longest=9, block_length=4, batch_size=40)
    first, end = len(SPECIAL_UNITS), SPECIAL_UNITS.index("<end>")
    lengths = set[int]()
    for seed in range(40):
        batch = data.batch(torch.Generator().manual_seed(seed), dev=False)
        length = batch.prompt - 2
        lengths.add(length)
        for row in batch.tokens.tolist():
            task = data.units[row[0]]
            items, answer = row[1 : 1 + length], row[batch.prompt : batch.prompt + length]
            assert data.units[row[batch.prompt - 1]] == "="
            assert len(set(items)) == length
            assert min(items) >= first
            assert sorted(answer) == sorted(items)
            expected = {"copy": items, "reverse": items[::-1], "sort": sorted(items)}
            assert answer == expected.get(task, answer)
            rest = row[batch.prompt + length :]
            assert rest == [end] * len(rest)
            assert 1 <= len(rest) <= 4
            assert (len(row) - batch.prompt) % 4 == 0
    assert lengths == set(range(3, 10))
    assert set(data.units) > {*LIST_TASKS, MASK}


def test_a_seed_draws_the_same_batches() -> None:
    data = ListTasks(batch_size=4, steps_per_epoch=3)
    one, other = ([batch.tokens.tolist() for batch in data.train_dataloader()] for _ in range(2))
    assert one == other
    assert len({str(tokens) for tokens in one}) == 3
    assert one[0] != next(iter(data.val_dataloader())).tokens.tolist()


def test_own_texts_are_sampled_once_and_cut_into_blocks(tmp_path: Any) -> None:
    language_model("llama").save_pretrained(tmp_path)
    data = OwnTexts(str(tmp_path), texts=20, length=30, block_length=4, batch_size=5)
    data.setup()
    texts = data.written
    data.setup()
    assert data.written is texts
    assert texts is not None
    assert texts.shape == (20, 30)
    assert len({tuple(text) for text in texts.tolist()}) > 15
    batch = data.batch(torch.Generator().manual_seed(0), dev=True)
    assert 1 <= batch.prompt <= 4
    assert (batch.tokens.shape[1] - batch.prompt) % 4 == 0
    beginnings = {tuple(text) for text in texts[:2, : batch.tokens.shape[1]].tolist()}
    assert {tuple(row) for row in batch.tokens.tolist()} <= beginnings  # a tenth of the texts is for validation
    assert data.units[-1] == MASK


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InputError, match="`shortest` and `longest` must be from 2 to the 5 items"):
        ListTasks(items=5, longest=6)
    with pytest.raises(InputError, match="`visible` must be"):
        BlockDiffusionModule(UNITS, sizes=SIZES, visible="causal")
    with pytest.raises(InputError, match="`block_length` must be"):
        BlockDiffusionModule(UNITS, sizes=SIZES, block_length=0)
