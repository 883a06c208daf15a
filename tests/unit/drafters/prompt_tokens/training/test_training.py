"""Tests the training of prompt tokens: what is compared with what, and that gradients reach the embeddings alone."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from mmdec.drafters.networks.training.teacher import Teacher
from mmdec.drafters.prompt_tokens.network import PromptTokens, PromptTokensConfig
from mmdec.drafters.prompt_tokens.training.module import PromptTokensModule
from mmdec.errors import InputError
from tests.support.tiny_text import language_model

PROMPTS = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in ([3, 4, 5], [6, 7])]
ANSWERS = [[8, 9, 10, 11, 12], [13, 14, 15]]


def module_of(model: Any, copies: int) -> PromptTokensModule:
    module = PromptTokensModule(tokens=1.0)
    torch.manual_seed(0)
    config = PromptTokensConfig.like(model.config, tokens=2, copies=copies)
    module.network = PromptTokens(config)
    module.frozen_teacher = (Teacher(model),)
    return module


@pytest.mark.parametrize("copies", [1, 2])
def test_guesses_are_the_targets_logits_at_soft_nodes(copies: int) -> None:
    model: Any = language_model()
    module = module_of(model, copies)
    guesses = module.guess(PROMPTS, ANSWERS, None)
    assert [place.tokens for place in guesses] == [[2, 3, 4, 2], [3, 4]]
    embed, soft = model.get_input_embeddings(), cast(PromptTokens, module.network).embeddings
    for index, place in enumerate(guesses):
        for logits, expected, text, token in zip(place.logits, place.expected, place.texts, place.tokens, strict=True):
            ids = [*PROMPTS[text]["input_ids"][0].tolist(), *ANSWERS[text][:token]]
            plain = model(torch.tensor([ids])).logits[0, -1]
            assert torch.allclose(expected, plain, atol=1e-5)
            known = embed(torch.tensor(ids[: len(ids) - index - 1]))
            chains = [torch.cat([known, soft[2 * copy : 2 * copy + index + 1]])[None] for copy in range(copies)]
            read = torch.stack([model(inputs_embeds=chain).logits[0, -1] for chain in chains]).mean(0)
            assert torch.allclose(logits, read, atol=1e-5)


def test_gradients_reach_the_embeddings_alone() -> None:
    model: Any = language_model()
    module = module_of(model, 1)
    optimizer = torch.optim.Adam(module.network.parameters(), lr=0.1)
    losses = list[float]()
    for _ in range(30):
        loss = module.compare_guesses(module.guess(PROMPTS, ANSWERS, None))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    gradient = cast(PromptTokens, module.network).embeddings.grad
    assert gradient is not None
    assert bool(gradient.any(1).all())
    assert all(weight.grad is None for weight in model.parameters())


def test_answers_too_short_for_a_guess_have_no_loss() -> None:
    module = module_of(language_model(), 1)
    guesses = module.guess(PROMPTS, [[8, 9], [13]], None)
    assert float(module.compare_guesses(guesses)["loss"].detach()) == 0.0


def test_features_cannot_be_kept() -> None:
    with pytest.raises(InputError, match="read no hidden states"):
        PromptTokensModule(keep_features=True)
