"""Tests the fast pass (fixed shapes, as CUDA graphs need) for every kind of target: tokens equal those of `generate`.

On a CPU, `tests/support/recorded_graphs.py` imitates CUDA graphs. The key-value slots are so small that runs need
larger ones. A pairwise cover; all cases, and every family of language models, with MMDEC_ALL=1 (`make test-all`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.drafters.medusa import Medusa
from mmdec.targets.cache import KVPool, RowLayout
from mmdec.targets.families import FAMILIES
from mmdec.targets.fast_pass import FastRun, bucket, fast_pass
from mmdec.types import Draft
from tests.support.families import model_of
from tests.support.pairwise import cover
from tests.support.recorded_graphs import Count, recorded_graphs
from tests.support.tiny_text import language_model, prompts
from tests.support.tiny_vlm import PAD, batch_of, row_of, vision_model
from tests.support.tiny_whisper import sound
from tests.support.vision_drafters import network_drafter
from tests.support.whisper_calls import MODELS as WHISPERS
from tests.support.whisper_calls import PLAIN, heads
from tests.support.wild import Wild

WHISPER = WHISPERS[80]
TEXTS = {"llama": language_model("llama"), "qwen2": language_model("qwen2", 1), "gpt2": language_model("gpt2", 3)}
VISION = ("llava", "qwen2_5_vl")
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": PAD}
SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "top_k": 20, "seed": 5}
GRID = {
    "target": [*TEXTS, "whisper", *VISION],
    "drafter": ["none", "lookup", "wild", "model", "own"],
    "nodes": [1, 3, (14, 4), None],
    "batch": [1, 3, 5],
    "attention": ["sdpa", "eager", "mmdec_tree"],
    "choice": ["greedy", "sampled"],
}
FEW = ["GPTNeoXForCausalLM", "JetMoeForCausalLM", "OPTForCausalLM"]
TRIED = sorted(FAMILIES) if os.environ.get("MMDEC_ALL") else [name for name in FEW if name in FAMILIES]


@pytest.fixture(autouse=True)
def graphs() -> Iterator[Count]:
    mmdec.default_statistics().clear()
    models = [WHISPER, *TEXTS.values(), *map(vision_model, VISION)]
    with recorded_graphs() as graphs:
        for model in models:
            fast_pass(model).enabled = True
        yield graphs
        for model in models:
            model.set_attn_implementation("sdpa")
            fast_pass(model).enabled = None
            fast_pass(model).clear()


def drafter(case: dict[str, Any], model: Any, wanted: list[list[int]]) -> Any:
    """By its name; "own" is the one that reads hidden states of this kind of target."""
    if case["drafter"] == "own":
        return (
            Medusa(heads("linear"), WHISPER.proj_out)
            if case["target"] == "whisper"
            else network_drafter("eagle", model)
        )
    known = {"none": lambda: None, "wild": lambda: Wild(len(wanted[0]), wanted), "model": lambda: model}
    return known.get(case["drafter"], lambda: case["drafter"])()


def inputs_of(target: str, batch: int) -> dict[str, Tensor]:
    if target in VISION:
        rng = random.Random(batch)
        return batch_of(target, [row_of(rng, content) for content in ("one", "none", "three", "video", "one")[:batch]])
    return prompts(batch)


@pytest.mark.parametrize(
    "case", cover(GRID, bool(os.environ.get("MMDEC_ALL"))), ids=lambda case: "-".join(map(str, case.values()))
)
def test_texts_are_the_models_own(case: dict[str, Any], graphs: Count) -> None:
    target, batch, nodes = case["target"], case["batch"], case["nodes"]
    if target == "whisper":
        options = {
            **PLAIN,
            "language": "en",
            "max_new_tokens": 24,
        }  # its attention is torch's, or there is no fast pass
        features = sound(batch, 1.0, 80, batch)
        wanted = WHISPER.generate(**features, **options)
        told = [[61, 62, 66, 70, *row] for row in wanted.tolist()]
        plug = mmdec.speculate(drafter(case, WHISPER, told), num_speculative_tokens=nodes)
        found = WHISPER.generate(**features, **options, custom_generate=plug)
    else:
        model = TEXTS[target] if target in TEXTS else vision_model(target)
        model.set_attn_implementation(case["attention"])
        inputs = inputs_of(target, batch)
        if case["choice"] == "sampled":
            fast_pass(model).enabled = False
            wanted = mmdec.generate(model, inputs, None, **SAMPLED).sequences
            fast_pass(model).enabled = True
        else:
            wanted = model.generate(**inputs, **GREEDY)
        options = SAMPLED if case["choice"] == "sampled" else GREEDY
        proposing = drafter(case, model, wanted.tolist())
        found = mmdec.generate(model, inputs, proposing, num_speculative_tokens=nodes, **options).sequences
    assert torch.equal(found, wanted)
    assert graphs.replayed > graphs.made > 0


@pytest.mark.parametrize("target", ["llama", "whisper", "qwen2_5_vl"])
def test_what_nobody_sees_counts_for_nothing(target: str, graphs: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns behind a row's text, rows that are padding, and what an earlier draft left: all of it poisoned."""

    def poisoned(run: FastRun, draft: Draft, store: KVPool, rows: RowLayout, *more: Any) -> Any:
        store.grow(rows.width + bucket(draft.tokens.shape[1]))
        slot = run._slots[-1]
        hidden = torch.ones(slot.rows, slot.columns, dtype=torch.bool)
        for row, (start, end) in enumerate(zip(rows.starts, rows.ends, strict=True)):
            hidden[row, start:end] = False
        for pool in slot.pools:
            pool.masked_fill_(hidden[:, None, :, None], 1e4)
        return score(run, draft, store, rows, *more)

    score = FastRun.score
    monkeypatch.setattr(FastRun, "score", poisoned)
    case = {"target": target, "drafter": "wild", "nodes": (9, 3), "attention": "sdpa", "choice": "greedy"}
    for batch in (1, 3):
        test_texts_are_the_models_own({**case, "batch": batch}, graphs)


@pytest.mark.parametrize("family", TRIED)
def test_every_family_of_language_models(family: str, graphs: Count) -> None:
    model = model_of(family)
    fast_pass(model).enabled = True
    inputs = prompts(3)
    options = {**GREEDY, "eos_token_id": 2, "max_new_tokens": 18}
    inputs["input_ids"] %= model.config.vocab_size
    wanted = model.generate(**inputs, **options)
    for proposing in ("lookup", Wild(0.5, wanted.tolist())):
        found = mmdec.generate(model, inputs, proposing, num_speculative_tokens=(7, 3), **options)
        assert torch.equal(found.sequences, wanted)
    mixture = any("Expert" in type(module).__name__ for module in model.modules())  # asks who goes to which expert
    assert ("cannot be captured" in (fast_pass(model).why_not() or "")) == mixture
    assert mixture or graphs.replayed > graphs.made > 0
