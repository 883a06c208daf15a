"""Tests DFlash's training: its loss equals a simple reference, its blocks attend as a mask matrix allows, and its
simulated chains equal those of decoding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmdec.drafters.dflash.network import DFlash
from mmdec.drafters.dflash.training.module import DFlashModule, block_attention, draw_roots
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.networks.training.simulation import measure
from mmdec.drafters.networks.training.teacher import TargetFeatures, Teacher
from mmdec.errors import InputError
from mmdec.generation.generate import generate
from tests.support.draft_networks import NaiveBlock, dflash_scores, draft_network
from tests.support.grid import slow_but
from tests.support.tiny_text import language_model

MODEL: Any = language_model(num_hidden_layers=5)
SMALL: dict[str, Any] = {"block_size": 4, "mask_token": 3, "num_hidden_layers": 2}


def trainer_of(network: Any, **options: Any) -> DFlashModule:
    """A module without a run."""
    module = DFlashModule(**options)
    module.network, module.frozen_teacher = network, (Teacher(MODEL),)
    module.needs = module.training_needs(network.config)
    return module.eval()


def drafting(**changes: Any) -> DFlash:
    network = draft_network("dflash", MODEL, **{**SMALL, **changes})
    assert isinstance(network, DFlash)
    return network


def texts_of(module: DFlashModule) -> list[TargetFeatures]:
    """Return the model's own answers, and one that is not."""
    prompts = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
               for row in ([5, 6, 7, 8], [11, 12], [30, 31, 32])]  # fmt: skip
    answers = module.teacher.answer(prompts[:2], 7)
    return module.teacher.compute_features(prompts, [*answers, [9, 3, 40, 21]], module.needs)


def naive(module: DFlashModule, texts: list[TargetFeatures]) -> tuple[float, float]:
    """Return the loss and the estimate of tokens per round: root by root, token by token."""
    drafter = NetworkDrafter(module.network, MODEL.get_input_embeddings(), MODEL.get_output_embeddings())
    depth = module.depth
    sums, counts, reached, roots = [0.0] * depth, [0] * depth, 0, 0
    for text in texts:
        for root in range(len(text.answer) - 1):
            before = text.features[: text.prompt + root, :-32]  # of all tokens before the root
            scores, running = dflash_scores(drafter, before, text.answer[root]), True
            for step in range(min(depth, len(text.answer) - 1 - root)):
                expected = module.teacher.logits(text.features[text.prompt + root + step, -32:])
                running = running and int(scores[step].argmax()) == int(expected.argmax())
                reached += running and step < 4
                sums[step] -= float((expected.softmax(-1) * scores[step]).sum())
                counts[step] += 1
            roots += 1
    loss = sum(0.7**step * total / max(count, 1) for step, (total, count) in enumerate(zip(sums, counts, strict=True)))
    return loss, 1 + reached / roots


@pytest.mark.parametrize("changes", [{}, {"block_size": 6}, {"from_anchor": True}], ids=["4", "6", "anchor"])
@torch.no_grad()
def test_the_loss_equals_the_naive_one(changes: dict[str, Any]) -> None:
    module = trainer_of(drafting(**changes), unroll_decay=0.7, anchors=3)
    texts = texts_of(module)
    parts = module.loss(texts)
    loss, rounds = naive(module, texts)
    assert loss > 1
    assert float(parts["loss"]) == pytest.approx(loss, rel=1e-4)
    assert ("round" in parts) == (module.depth >= 4)
    assert float(parts.get("round", rounds)) == pytest.approx(rounds)


HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {"head": "vanilla", "head_rank": 6, "from_anchor": True, "confidence": True},
    "gated": {"head": "gated", "head_rank": 6},
    "rnn": {"head": "rnn", "head_rank": 6, "confidence": True, "confidence_reads_token": False},
    "dflash2": {"head": "dflash2", "head_rank": 6, "head_candidates": 9, "convolution_group": 8},
    "domino": {"head": "domino", "head_rank": 6, "head_state": 10, "plain_prefix": 1, "from_anchor": True},
}


def naive_head_loss(module: DFlashModule, texts: list[TargetFeatures], base_share: float) -> float:
    """Return the loss of a network with a head: root by root, token by token, with true tokens above."""
    drafter = NetworkDrafter(module.network, MODEL.get_input_embeddings(), MODEL.get_output_embeddings())
    config: Any = module.network.config
    sums, counts = [0.0] * module.depth, [0] * module.depth
    for text in texts:
        for root in range(len(text.answer) - 1):
            block = NaiveBlock(drafter, text.features[: text.prompt + root, :-32], text.answer[root])
            for step in range(min(module.depth, len(text.answer) - 1 - root)):
                p = module.teacher.logits(text.features[text.prompt + root + step, -32:]).softmax(-1)
                true = text.answer[root + step + 1]
                scores, confidence = block.logits(tuple(text.answer[root + 1 : root + step + 1]))
                base = drafter.output.weight @ block.normed[config.block_size - config.drafts + step]
                q = scores.softmax(-1)
                if config.head == "dflash2":
                    loss = -(p * base.log_softmax(-1)).sum() - (q[true].log() if q[true] > 0 else 0.0)
                elif config.head == "domino":
                    parts = [-(p * logits.log_softmax(-1)).sum() for logits in (scores, base)]
                    loss = (1 - base_share) * parts[0] + base_share * parts[1]
                else:
                    loss = -0.1 * (p * q.log()).sum() + 0.9 * (p - q).abs().sum() / 2
                if confidence is not None:
                    shared = torch.minimum(p, q).sum()
                    loss = loss - shared * confidence.log() - (1 - shared) * (1 - confidence).log()
                sums[step] += float(loss)
                counts[step] += 1
    return sum(0.7**step * total / max(count, 1) for step, (total, count) in enumerate(zip(sums, counts, strict=True)))


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_the_losses_of_heads_equal_the_naive_ones(head: str) -> None:
    module = trainer_of(drafting(**HEADS[head]), unroll_decay=0.7, anchors=3)
    texts = texts_of(module)
    loss = naive_head_loss(module, texts, 0.0)
    assert float(module.loss(texts)["loss"]) == pytest.approx(loss, rel=1e-4)
    if head == "domino":  # the first step trains the block's own logits alone
        module.anchors = 100
        assert float(module.train().loss(texts)["loss"]) == pytest.approx(naive_head_loss(module, texts, 1.0), rel=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_every_weight_of_a_head_is_trained(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = trainer_of(drafting(**HEADS[head]), anchors=3).train()
    monkeypatch.setattr(DFlashModule, "base_share", 0.5)
    module.loss(texts_of(module))["loss"].backward()
    for name, weight in module.network.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.isfinite().all()), name
        assert bool((weight.grad != 0).any()), name


def test_a_new_network_of_dflash_2_drafts_as_dflash() -> None:
    """Its convolutions and its selector change nothing before they are trained."""
    torch.manual_seed(0)
    config: Any = DFlashModule(network={**SMALL, **HEADS["dflash2"]}).draft_config(Teacher(MODEL))
    network = DFlash(config)
    plain = DFlash(replace(config, head="none"))
    plain.load_state_dict(network.state_dict(), strict=False)
    ranks = []
    for trained in (network, plain):
        module = trainer_of(trained)
        ranks.append(module.rank(texts_of(module))[0].clamp(max=config.head_candidates))
    assert torch.equal(*ranks)


@torch.no_grad()
def test_every_position_is_an_anchor_unless_limited() -> None:
    module = trainer_of(drafting())
    texts = texts_of(module)
    expected = module.loss(texts)["loss"]
    torch.testing.assert_close(module.train().loss(texts)["loss"], expected)
    module.anchors = 2
    assert not torch.isclose(module.loss(texts)["loss"], expected)


def test_roots_are_drawn_without_repetition_within_each_row() -> None:
    lengths = torch.tensor([9, 2, 5])
    for most in (1, 3, 5, 20):
        drawn = draw_roots(lengths, most)
        assert drawn.shape == (3, min(most, 9))
        for row, length in zip(drawn.tolist(), lengths.tolist(), strict=True):
            roots_of_row = [root for root in row if root >= 0]
            assert len(roots_of_row) == min(most, length)
            assert roots_of_row == sorted(set(roots_of_row))
            assert max(roots_of_row) < length
    often = torch.stack([draw_roots(lengths, 1)[0] for _ in range(200)])
    assert set(often.flatten().tolist()) == set(range(9))


def test_blocks_attend_as_a_mask_matrix() -> None:
    torch.manual_seed(0)
    size, count, before = 3, 4, 7
    queries = torch.randn(2, 4, count * size, 6, requires_grad=True)
    keys, values = (torch.randn(2, 2, before + count * size, 6, requires_grad=True) for _ in range(2))
    seen = torch.rand(2, count, before) < 0.6
    seen[..., 0] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    pairs = [tuple(part[:, :, piece] for part in (keys, values)) for piece in (slice(before), slice(before, None))]
    result = block_attention(queries, pairs[0], pairs[1], mask[:, None, None], size)  # type: ignore[arg-type]
    own = torch.block_diag(*[torch.ones(size, size)] * count).bool().expand(2, -1, -1)
    whole = torch.cat([seen.repeat_interleave(size, 1), own], 2)[:, None]
    wanted = scaled_dot_product_attention(queries, keys, values, attn_mask=whole, enable_gqa=True)
    torch.testing.assert_close(result, wanted)
    for gradient, expected in zip(gradients(result, queries, keys, values), gradients(wanted, queries, keys, values),
                                  strict=True):  # fmt: skip
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.arange(output.numel()).view_as(output).sin()
    return torch.autograd.grad((output * weights).sum(), inputs, retain_graph=True)


@pytest.mark.parametrize("head", slow_but(["none", *HEADS], slice(None, None, 2)))
def test_simulated_chains_equal_decoding(head: str) -> None:
    """A network that training teaches one answer."""
    prompt = torch.tensor([[5, 6]])
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    module = trainer_of(drafting(**HEADS.get(head, {})), chain=3)
    answer = module.teacher.answer([inputs], 30)[0]
    readings = module.teacher.compute_features([inputs], [answer], module.needs)
    optimizer = torch.optim.Adam(module.network.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        module.loss(readings)["loss"].backward()
        optimizer.step()
    drafter = NetworkDrafter(module.network, MODEL.get_input_embeddings(), MODEL.get_output_embeddings())
    decoded = generate(MODEL, inputs, drafter, num_speculative_tokens=3, max_new_tokens=30, do_sample=False)
    assert decoded.sequences[0, 2:].tolist() == answer
    chain, _, _ = measure(module.rank(readings), 3, 0)
    rounds = len(decoded.rounds) - 1
    assert chain == pytest.approx((len(answer) - 1) / rounds)
    assert rounds < len(answer) - 1  # else nothing was accepted


def test_the_mask_is_the_padding_token_unless_named() -> None:
    teacher = Teacher(MODEL)
    for named, mask in (({}, teacher.pad), ({"mask_token": 7}, 7)):
        config: Any = DFlashModule(network=named).draft_config(teacher)
        assert config.mask_token == mask
    needs = DFlashModule().training_needs(config)
    assert (needs.layers, needs.embeds) == ((*config.layers, -1), False)


def test_no_anchors_are_refused() -> None:
    with pytest.raises(InputError, match="`anchors` must be at least 1"):
        DFlashModule(anchors=0)


@pytest.mark.parametrize("wrong", [{"own_head": True}, {"own_embedding": True}])
def test_networks_with_ends_of_their_own_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="the target's embedding and LM head"):
        DFlashModule(network=wrong).draft_config(Teacher(MODEL))
