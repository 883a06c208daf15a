"""Tests EAGLE-3's training: its loss equals a simple reference, its draft vocabulary has the answers' most frequent
tokens, and its simulated chains equal those of decoding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.drafters.eagle.eagle3 import Eagle3
from mmdec.drafters.eagle.training.eagle3 import Eagle3Module
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.networks.training import module as training
from mmdec.drafters.networks.training.simulation import measure
from mmdec.drafters.networks.training.teacher import TargetFeatures, Teacher
from mmdec.drafters.networks.training.unroll import unroll_inputs, unroll_steps
from mmdec.errors import InputError
from mmdec.generation.generate import generate
from tests.support.draft_networks import draft_network, overfitted
from tests.support.tiny_text import language_model

MODEL: Any = language_model(num_hidden_layers=5)
PART = [token for token in range(61) if token % 3]  # a draft vocabulary of 40 tokens


def trainer_of(network: Any, **options: Any) -> Eagle3Module:
    """A module without a run."""
    module = Eagle3Module(**options)
    module.network, module.frozen_teacher = network, (Teacher(MODEL),)
    module.needs = module.training_needs(network.config)
    return module.eval()


def drafting(size: int = 0) -> Eagle3:
    network = draft_network("eagle3", MODEL, draft_vocab_size=size)
    assert isinstance(network, Eagle3)
    if size:
        network.get_buffer("d2t").copy_(torch.tensor(PART) - torch.arange(size))
        network.get_buffer("t2d").zero_()[PART] = True
    return network


def texts_of(module: Eagle3Module) -> list[TargetFeatures]:
    """Return the model's own answers, and one that is not."""
    prompts = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
               for row in ([5, 6, 7, 8], [11, 12], [30, 31, 32])]  # fmt: skip
    answers = module.teacher.answer(prompts[:2], 7)
    return module.teacher.compute_features(prompts, [*answers, [9, 3, 40, 21]], module.needs)


def naive(module: Eagle3Module, texts: list[TargetFeatures], steps: list[Tensor]) -> tuple[float, float]:
    """Return the loss and the estimate of tokens per round: root by root, token by token."""
    network: Any = module.network
    tokens = network.draft_vocabulary.all_token_ids().tolist()
    total, reached, roots = 0.0, 0, 0
    running = {(row, root): True for row, text in enumerate(texts) for root in range(len(text.answer) - 1)}
    for step, hidden in enumerate(steps):
        sums, count = 0.0, 0
        for row, text in enumerate(texts):
            states = text.features[text.prompt :, -32:]  # the LM head's input at the answer's tokens
            for root in range(len(text.answer) - 1 - step):
                expected = module.teacher.logits(states[root + step]).tolist()
                drafted = network.logits(hidden[row, root], None).tolist()
                p = [math.exp(expected[token]) for token in tokens]
                q = [math.exp(value) for value in drafted]
                best = max(range(len(expected)), key=expected.__getitem__)
                right = tokens[drafted.index(max(drafted))] == best
                running[row, root] &= right
                reached += running[row, root]
                if best in tokens:
                    sums -= sum(a / sum(p) * math.log(b / sum(q)) for a, b in zip(p, q, strict=True))
                    count += 1
        total += 0.8**step * sums / max(count, 1)
    roots = len(running)
    return total, 1 + reached / roots


@pytest.mark.parametrize("size", [0, 40])
@pytest.mark.parametrize("cells", [1 << 20, 100])
@torch.no_grad()
def test_the_loss_equals_the_naive_one(size: int, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MAX_LOGITS", cells)
    module = trainer_of(drafting(size), unroll=4, unroll_decay=0.8)
    texts = texts_of(module)
    columns = module.columns(texts)
    parts = module.compare(columns, texts)
    loss, rounds = naive(module, texts, module.steps(columns, 4))
    assert loss > 1
    assert float(parts["loss"]) == pytest.approx(loss, rel=1e-4)
    assert float(parts["round"]) == pytest.approx(rounds)


def test_chunked_gradients_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for cells in (1 << 20, 100):
        monkeypatch.setattr(training, "MAX_LOGITS", cells)
        module = trainer_of(drafting(40), unroll=3)
        module.loss(texts_of(module))["loss"].backward()
        gradients.append(module.network.fc.weight.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0


def test_simulated_chains_equal_decoding() -> None:
    """A network that knows one answer, with a draft vocabulary that lacks some of its tokens."""
    prompt = torch.tensor([[5, 6]])
    whole = MODEL.generate(input_ids=prompt, do_sample=False, max_new_tokens=30)
    trained = overfitted("eagle3", MODEL, whole[:, :-1]).network
    draft_vocabulary = sorted(set(whole[0].tolist()))[:-1]
    network = draft_network("eagle3", MODEL, draft_vocab_size=len(draft_vocabulary))
    assert isinstance(network, Eagle3)
    state = {name: value for name, value in trained.state_dict().items() if name != "lm_head.weight"}
    network.load_state_dict(state, strict=False)
    network.lm_head.weight.data.copy_(trained.lm_head.weight.data[draft_vocabulary])  # type: ignore[union-attr, operator]
    network.get_buffer("d2t").copy_(torch.tensor(draft_vocabulary) - torch.arange(len(draft_vocabulary)))
    drafter = NetworkDrafter(network, MODEL.get_input_embeddings(), MODEL.get_output_embeddings())
    module, depth = trainer_of(network, chain=3), 3
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    decoded = generate(MODEL, inputs, drafter, num_speculative_tokens=depth, max_new_tokens=30, do_sample=False)
    answer = decoded.sequences[0, 2:].tolist()
    assert answer == whole[0, 2:].tolist()
    ranks = module.rank(module.teacher.compute_features([inputs], [answer], module.needs))
    chain, _, _ = measure(ranks, depth, 0)
    rounds = len(decoded.rounds) - 1
    assert chain == pytest.approx((len(answer) - 1) / rounds)
    assert rounds < len(answer) - 1  # else nothing was accepted


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("temporal", "placeholder", False)),
        ({"columns": "projected"}, ("text", "projected", True)),
        ({"columns": "engine", "network": {"positions": "text"}}, ("text", "placeholder", False)),
    ],
)
def test_the_configuration_stores_the_convention(options: dict[str, Any], expected: tuple[str, str, bool]) -> None:
    module = Eagle3Module(**options)
    config: Any = module.draft_config(Teacher(MODEL))
    assert (config.positions, config.pictures, module.training_needs(config).embeds) == expected
    assert module.training_needs(config).layers == (*config.layers, -1)


@pytest.mark.parametrize("wrong", [{"columns": "both"}, {"draft_vocab": -1}])
def test_meaningless_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        Eagle3Module(**wrong)


def test_all_tokens_are_drafted_where_the_vocabulary_is_not_larger() -> None:
    config: Any = Eagle3Module(draft_vocab=61).draft_config(Teacher(MODEL))
    assert config.draft_vocab_size == 0


def test_unrolled_steps_equal_the_loss() -> None:
    """`depth` steps are compared, of a network that was made for more."""
    module = trainer_of(drafting(), unroll=2)
    texts = texts_of(module)
    columns = module.columns(texts)
    assert len(module.steps(columns, module.depth)) == 2
    assert torch.equal(columns.states, unroll_inputs(module.network, [
        TargetFeatures(t.prompt, t.answer, t.embeds, t.features[:, :96], t.visual) for t in texts]).states)  # fmt: skip
    assert "round" not in module.compare(columns, texts)
    assert len(unroll_steps(module.network, columns, 9)) == 6
