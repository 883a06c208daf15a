"""Tests that FLASH's training computes the slots that a pass for each root alone computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdec.drafters.flash.network import FlashNetwork
from mmdec.drafters.flash.training.module import FlashModule, raw_slots, text_embeds
from mmdec.drafters.networks.training.teacher import TargetFeatures
from mmdec.drafters.networks.training.unroll import unroll_inputs
from tests.support.draft_networks import draft_network
from tests.support.random_texts import TEXTS
from tests.support.tiny_vlm import vision_model


def slots_of(network: FlashNetwork, text: TargetFeatures, root: int) -> list[Tensor]:
    """Slots (H,) of one column of the answer, whose tokens are within it: a pass over slot 0 of every column up to this
    one and over its other slots, each refined by the answer's own tokens."""
    begin, embedded = text.prompt, torch.zeros(32).double()
    prompt = network.prompt(text.embeds[:begin], text.features[:begin], text.visual[:begin])
    known = network.fuse(text.embeds[begin : begin + root + 1], text.features[begin - 1 : begin + root])
    own = network.slot_states(known[-1])
    states = torch.cat([prompt.states, known[:-1], own])
    place = begin - 1 + root
    positions = torch.cat([prompt.positions, torch.arange(begin - 1, place), place + torch.arange(network.slots)])
    hidden, _ = network(states[None], positions[None])
    raw, result = network.finish(hidden[0, -network.slots :], text.features[place]), []
    for slot in range(min(network.slots, len(text.answer) - 1 - root)):
        if slot:
            embedded = embedded + text.embeds[place + 1 + slot]
        result.append(network.refine_slot(raw[slot], embedded, slot))
    return result


def test_unrolled_slots_equal_a_pass_per_column() -> None:
    """FLASH's slots of the answer equal those of a pass for each column alone."""
    network = draft_network("flash", vision_model("llava"), slots=3, latents=2).double()
    assert isinstance(network, FlashNetwork)
    torch.nn.init.normal_(network.residual_gate)
    assert network.refiners[1].up.weight.any()  # type: ignore[union-attr, operator] # they change what they are given
    module: Any = FlashModule()
    module.network = network
    for text in TEXTS:
        columns = unroll_inputs(network, [text])
        count = len(text.answer) - 1
        steps = FlashModule.steps(module.eval(), columns, 3)
        assert [states.shape[1] for states in steps] == [max(count - slot, 0) for slot in range(3)][: len(steps)]
        for root in range(count):
            for slot, expected in enumerate(slots_of(network, text, root)):
                torch.testing.assert_close(steps[slot][0, root], expected)
    batch = unroll_inputs(network, TEXTS)
    for row, text in enumerate(TEXTS):
        count = len(text.answer) - 1
        single = raw_slots(network, unroll_inputs(network, [text]))
        torch.testing.assert_close(raw_slots(network, batch)[row, :count], single[0])
    embeds = text_embeds(batch, 3)
    assert torch.equal(embeds[0, 1, 0], TEXTS[0].embeds[TEXTS[0].prompt + 2])
    assert torch.equal(embeds[0, 1, 1], TEXTS[0].embeds[TEXTS[0].prompt + 3])
    assert not embeds[2, 0].any()  # an answer of two tokens: nothing follows
