"""Compares SpecVLM's drafter with EAGLE-2's of the same size, for several numbers of visual tokens: the length of the
drafter's KV cache, and the time of its pass over the prompt and of its rounds.

Weights, embeddings and features are random; random ones take the same time as trained ones. An oracle accepts the first
`accepted` nodes of each draft, wherever they are in the tree: trees from random weights are too shallow for a path of
that length. The target does not run, because its pass is the same for both drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmdec.decode.tree import single
from mmdec.drafters.draft_memory import Memory
from mmdec.drafters.tree_growing import TreeGrowing
from mmdec.evaluation.bench.pairing import paired, prepared
from mmdec.evaluation.bench.report import BenchReport, Comparison, Quantity
from mmdec.evaluation.quality.harness import Log, no_log
from mmdec.hub.provenance import hardware
from mmdec.nn.draft_network import DraftConfig, DraftNetwork
from mmdec.nn.specvlm import CHOICES, SpecVLM, SpecVLMConfig
from mmdec.types import Context, Draft, Plan, Scores, Verdict

SIZES: dict[str, dict[str, int]] = {  # drafters for the shipped model, a model of 1 B parameters, and LLaVA-1.5-7B
    "small": {"hidden_size": 160, "vocab_size": 821, "intermediate_size": 432, "num_attention_heads": 4},
    "medium": {"hidden_size": 1024, "vocab_size": 8192, "intermediate_size": 2816, "num_attention_heads": 16},
    "7B": {"hidden_size": 4096, "vocab_size": 32064, "intermediate_size": 11008, "num_attention_heads": 32},
}
VISUAL = (64, 256, 1024)  # numbers of image tokens for which both drafters are timed
BEFORE, AFTER = 8, 24  # number of text tokens before and after the image tokens
PLAN = Plan(nodes=59, depth=7)  # the size of EAGLE-2's and SpecVLM's trees, root not counted
ROUNDS = 8  # number of rounds in each timed call


class Run:
    """A drafter and a random prompt; its methods run the drafter on the prompt, and then in rounds.

    visual: number of visual tokens in the prompt. accepted: number of nodes that the oracle accepts of each draft.
    """

    def __init__(self, drafter: TreeGrowing, visual: int, accepted: int) -> None:
        self.drafter, self.accepted = drafter, accepted
        weight = drafter.output.weight
        length = BEFORE + visual + AFTER
        drawn = torch.Generator().manual_seed(0)
        states = torch.randn(2, 1, length, weight.shape[1], generator=drawn).to(weight)
        columns = torch.arange(length, device=weight.device)
        mask = torch.ones(1, length, dtype=torch.bool, device=weight.device)
        visual_mask = ((columns >= BEFORE) & (columns < BEFORE + visual))[None]
        tokens = torch.zeros(1, length, dtype=torch.long, device=weight.device)
        self.context = Context(
            tokens, mask, columns[None, None], columns[-1:] + 1, {-1: states[0]}, embeds=states[1], visual=visual_mask
        )

    @torch.inference_mode()
    def prompt(self) -> Memory:
        """Run the drafter's pass over the prompt. Returns the drafter's memory, which has its KV cache."""
        memory = self.drafter.start(self.context)
        self._accept(memory, single(torch.ones_like(self.context.tokens[:, 0])), 0)
        self.drafter.take_in(memory).hidden(self.drafter.network, memory.cache, memory.packed)
        return memory

    @torch.inference_mode()
    def begun(self) -> Memory:
        """Run the prompt, and one round in which no node is accepted. Returns the drafter's memory."""
        memory = self.prompt()
        self._accept(memory, single(torch.ones_like(self.context.tokens[:, 0])), 0)
        return memory

    @torch.inference_mode()
    def decode(self, memory: Memory) -> None:
        """Run `ROUNDS` rounds. memory: from `begun`; the rounds extend it."""
        roots = torch.ones_like(self.context.tokens[:, 0])
        for _ in range(ROUNDS):
            self._accept(memory, self.drafter.propose(memory, roots, PLAN), self.accepted)

    def _accept(self, memory: Memory, draft: Draft, count: int) -> None:
        nodes = torch.arange(count + 1, device=draft.tokens.device)[None]
        features = self.context.features[-1][:, :1].expand(-1, draft.tokens.shape[1], -1)
        tokens = torch.cat([draft.tokens.gather(1, nodes[:, 1:]), torch.ones_like(nodes[:, :1])], 1)
        ended = torch.zeros_like(nodes[:, 0], dtype=torch.bool)
        verdict = Verdict(nodes, tokens[:, -1], ended, tokens, torch.full_like(nodes[:, 0], count + 1))
        self.drafter.update(memory, draft, Scores(features, {-1: features}), verdict)


def bench_compressor(
    size: str = "medium",
    visual: Sequence[int] = VISUAL,
    compressors: Sequence[str] = CHOICES,
    accepted: int = 3,
    repeats: int = 5,
    device: str = "cpu",
    threads: int = 2,
    log: Log = no_log,
) -> BenchReport:
    """Time each compressor at each number of visual tokens.

    size: a key of `SIZES`. visual: numbers of visual tokens. compressors: names of SpecVLM's image compressors.
    accepted: drafted tokens that the oracle accepts in a round. repeats: timed pairs of calls.
    Returns: the report. A speed-up is EAGLE-2's time divided by SpecVLM's.
    """
    torch_device = prepared(device, threads)
    dtype = torch.float32 if torch_device.type == "cpu" else torch.bfloat16
    eagle = random_drafter(size, None, torch_device, dtype)
    rows: list[Comparison] = []
    caches: list[Quantity] = []
    for name in compressors:
        log(f"compressor {name}, visual tokens: {', '.join(map(str, visual))}")
        specvlm = random_drafter(size, name, torch_device, dtype)
        for count in visual:
            a, b = (Run(drafter, count, accepted) for drafter in (eagle, specvlm))
            before, after = (max(run.prompt().cache.lengths) for run in (a, b))
            group = f"{count} visual tokens"
            caches.append(Quantity(f"{name}, {group}: cache over EAGLE-2's", 100 * after / before, "%", 1))
            prompt = paired(a.prompt, b.prompt, repeats, torch_device)
            rounds = paired(_rounds(a), _rounds(b), repeats, torch_device)
            round_ = replace(rounds, a_ms=rounds.a_ms / ROUNDS, b_ms=rounds.b_ms / ROUNDS)
            rows += [
                found.turned().row(
                    *(f"SpecVLM {name}", "EAGLE-2", group, "length", timed), size=float(count), unit="visual tokens"
                )
                for timed, found in (("prompt", prompt), ("round", round_))
            ]
    return BenchReport(
        bench="compressor",
        title="SpecVLM's drafter against EAGLE-2's, random weights",
        hardware=hardware(device=torch_device, dtype=dtype, batch=1, threads=threads),
        comparisons=tuple(rows),
        quantities=tuple(caches),
        not_measured={"acceptance": "an oracle accepts, whatever is drafted"},
        details={
            "what": f"random weights, {size}, {BEFORE} + {AFTER} text tokens, drafts of {PLAN.nodes} nodes, "
            f"{PLAN.depth} deep, {accepted} accepted by an oracle, {ROUNDS} rounds; EAGLE-2 has SpecVLM's input norm",
        },
    )


def _rounds(run: Run) -> Callable[[], None]:
    """Return a function that runs `ROUNDS` rounds. All calls share one memory, so that the cache grows as in
    decoding."""
    memory = run.begun()
    return lambda: run.decode(memory)


def random_drafter(size: str, compressor: str | None, device: torch.device, dtype: torch.dtype) -> TreeGrowing:
    """Build a drafter with random weights. size: a key of `SIZES`.

    compressor: name of the only image compressor of a SpecVLM drafter; None: build EAGLE-2's drafter.
    """
    sizes = SIZES[size]
    heads = sizes["num_attention_heads"]
    fields: dict[str, Any] = {
        **sizes,
        "num_key_value_heads": heads,
        "head_dim": sizes["hidden_size"] // heads,
        "input_norm": True,
    }
    torch.manual_seed(0)
    if compressor is None:
        network: DraftNetwork = DraftNetwork(DraftConfig(**fields))
    else:
        network = SpecVLM(SpecVLMConfig(**fields, compressors=(compressor,)))
    embedding = nn.Embedding(sizes["vocab_size"], sizes["hidden_size"], device=device, dtype=dtype)
    output = nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False, device=device, dtype=dtype)
    return TreeGrowing(network.to(device, dtype), embedding, output)
