"""Tests the training of heads: its loss and its simulated chains equal those of a naive reading, new heads begin as the
target, and training lowers the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.core.tree_shape import MAX_RANKS
from mmdec.drafters.heads.network import Heads
from mmdec.drafters.heads.training.module import HeadsModule, start_from_target
from mmdec.drafters.networks.training.module import target_states
from mmdec.drafters.networks.training.teacher import TargetFeatures, Teacher
from mmdec.errors import InputError
from tests.support.draft_networks import FORMS_OF, draft_network, from_scratch, tree_growing
from tests.support.tiny_text import language_model

MODEL: Any = language_model(num_hidden_layers=2)
DECAY = 0.7


def trainer_of(network: Any, **options: Any) -> HeadsModule:
    """A module without a run."""
    module = HeadsModule(unroll_decay=DECAY, unroll=4, **options)
    module.network, module.frozen_teacher = network, (Teacher(MODEL),)
    module.needs = module.training_needs(network.config)
    return module.eval()


def texts_of(module: HeadsModule) -> list[TargetFeatures]:
    """Return the model's own answers, and one that is not."""
    prompts = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
               for row in ([5, 6, 7, 8], [11, 12], [30, 31, 32])]  # fmt: skip
    answers = module.teacher.answer(prompts[:2], 7)
    return module.teacher.compute_features(prompts, [*answers, [9, 3, 40, 21, 17, 28, 5]], module.needs)


def scores_of(module: HeadsModule, text: TargetFeatures, prompt: list[int], root: int, count: int) -> Tensor:
    """Return the log-probabilities (V,) of the token after a root and `count` true tokens, by the naive reading."""
    drafter = tree_growing("heads", MODEL)
    drafter.network = module.network
    before = [*prompt, *text.answer[: root + 1]]
    features = text.features[: text.prompt + root]
    path = tuple(text.answer[root + 1 : root + 1 + count])
    context: Any = type("NoPictures", (), {"embeds": None, "media": None})
    return from_scratch(drafter, context, features, before, path)


@pytest.mark.parametrize("form", FORMS_OF["heads"])
@torch.no_grad()
def test_loss_and_ranks_equal_the_naive_ones(form: str) -> None:
    module = trainer_of(draft_network("heads", MODEL, **FORMS_OF["heads"][form]))
    texts, prompts = texts_of(module), [[5, 6, 7, 8], [11, 12], [30, 31, 32]]
    depth = module.depth
    sums, counts, accepted, roots = [0.0] * depth, [0] * depth, 0, 0
    ranks = module.rank(texts)
    for text, prompt, ranked in zip(texts, prompts, ranks, strict=True):
        for root in range(len(text.answer) - 1):
            running = True
            for level in range(min(depth, len(text.answer) - 1 - root)):
                scores = scores_of(module, text, prompt, root, level)
                expected = module.teacher.logits(text.features[text.prompt + root + level])
                running = running and int(scores.argmax()) == int(expected.argmax())
                accepted += running and level < 4
                sums[level] -= float((expected.softmax(-1) * scores).sum())
                counts[level] += 1
                if level < ranked.shape[1]:
                    better = int((scores > scores[text.answer[root + 1 + level]]).sum())
                    assert int(ranked[root, level]) == min(better, MAX_RANKS)
            roots += 1
    parts = module.loss(texts)
    means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
    assert float(parts["loss"]) == pytest.approx(sum(DECAY**level * mean for level, mean in enumerate(means)), rel=1e-4)
    assert ("round" in parts) == (depth >= 4)
    assert float(parts.get("round", 1 + accepted / roots)) == pytest.approx(1 + accepted / roots)


@pytest.mark.parametrize(
    "form", ["plain", "medusa", "amphista", "hydra++", "cerberus", "redrafter", "redrafter-narrow"]
)
@torch.no_grad()
def test_new_heads_repeat_the_targets_distribution(form: str) -> None:
    settings = {**FORMS_OF["heads"][form], "prefix_layer": False}
    network: Any = Heads(Heads.config_class.like(MODEL.config, **settings))
    embedding = MODEL.get_input_embeddings().weight
    start_from_target(network, MODEL.get_output_embeddings().weight, None, embedding)
    hidden = torch.randn(3, 32)
    expected = MODEL.get_output_embeddings()(hidden)
    state = network.heads.begin(hidden)
    for level in range(3):
        state = network.heads.step(state, torch.tensor([4, 5, 6]), level, MODEL.get_input_embeddings())
        logits = network.level_logits(state, level, MODEL.get_output_embeddings())
        if form == "redrafter":  # its blocks are new, but add nothing yet
            assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("form", ["plain", "medusa", "amphista", "hydra++", "redrafter-narrow", "mlp-tied"])
def test_every_weight_learns(form: str) -> None:
    torch.manual_seed(0)
    network = draft_network("heads", MODEL, **FORMS_OF["heads"][form]).float()
    module = trainer_of(network).train()
    texts = texts_of(module)
    before = float(module.loss(texts)["loss"].detach())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        module.loss(texts)["loss"].backward()
        assert all(weight.grad is not None and bool(weight.grad.any()) for weight in network.parameters())
        optimizer.step()
    assert float(module.loss(texts)["loss"].detach()) < 0.8 * before


@pytest.mark.parametrize("form", ["plain", "mlp", "hydra++"])
@torch.no_grad()
def test_a_part_of_the_vocabulary_is_compared_in_training_alone(form: str) -> None:
    module = trainer_of(draft_network("heads", MODEL, **FORMS_OF["heads"][form]), vocabulary=9)
    texts = texts_of(module)
    whole = float(module.loss(texts)["loss"])
    tokens = module.compared_tokens = torch.tensor([2, 3, 9, 11, 17, 21, 40, 41, 60])
    assert float(module.loss(texts)["loss"]) == whole
    columns = module.columns(texts)
    expected = target_states(texts, 32, (-1,))
    loss = 0.0
    for level, states in enumerate(module.steps(columns, module.depth)):
        rows = columns.mask[:, level:]
        own = module.level_logits(states, level)[rows][:, tokens].log_softmax(-1)
        theirs = module.teacher.logits(expected[:, level:])[rows][:, tokens].softmax(-1)
        loss += DECAY**level * float(-(theirs * own).sum(-1).mean())
    assert float(module.train().loss(texts)["loss"]) == pytest.approx(loss, rel=1e-5)


def test_a_negative_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="`vocabulary` must be 0 or more"):
        HeadsModule(vocabulary=-1)
