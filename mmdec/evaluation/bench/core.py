"""Times mmdec's loop against transformers' own, on language models with random weights. Tokens are compared before
timing.

Random weights do not give realistic acceptance, so two kinds of text show its bounds. "Repeating" text is from weights
that fall into loops: nearly every copied token is accepted. In "wandering" text, nearly no copied token is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mmdec.decode.loop import Round
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.tree import trees_from_lists
from mmdec.evaluation.bench.pairing import LOOKUP, paired, prepared, quartiles
from mmdec.evaluation.bench.report import WALL, BenchReport, Comparison, Exactness, Quantity
from mmdec.evaluation.quality.harness import Log, no_log
from mmdec.generation.speculation import generate, speculate
from mmdec.hub.provenance import hardware
from mmdec.types import Context, Draft, MmdecError, Needs, Plan, Scores, Target, Verdict

SIZES: dict[str, dict[str, int]] = {  # sizes of random models with about 2, 30 and 130 million parameters
    "2M": {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6},
    "30M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8},
    "130M": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
}
TEXTS = {"repeating": 0.02, "wandering": 0.12}  # kind of text -> standard deviation of the random weights that write it
PROMPT, NEW_TOKENS = 64, 128  # tokens of the prompt and of the answer
ROWS = 8  # number of rows of the larger batch
DTYPE = torch.float32


class Noise:
    """A drafter that is almost always wrong: it drafts random trees of the plan's size."""

    name = "noise"
    needs = Needs()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def check(self, target: Target) -> None:
        """Accept every target."""

    def start(self, context: Context) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def propose(self, memory: torch.Generator, roots: Tensor, plan: Plan) -> Draft:
        tokens = torch.randint(self.vocab_size, (len(roots), plan.nodes), generator=memory).tolist()
        parents = [max(0, node - 2) for node in range(plan.nodes)]
        return trees_from_lists(roots, [(row, parents) for row in tokens])

    def update(self, memory: torch.Generator, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Do nothing: this drafter ignores which tokens were accepted."""

    def select(self, memory: torch.Generator, live: Tensor) -> None:
        """Do nothing: the drafter keeps no state for each row."""


def random_model(size: str, text: str = "repeating", device: str = "cpu") -> PreTrainedModel:
    """Build a Llama with random weights. size: a key of `SIZES`. text: the kind of text that it writes, a key of
    `TEXTS`."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": SIZES[size]["hidden_size"] // 64, "max_position_embeddings": 1024}
    sizes: dict[str, Any] = {**SIZES[size], **heads}
    config = LlamaConfig(**sizes, initializer_range=TEXTS[text], eos_token_id=None, pad_token_id=0)
    model: Any = LlamaForCausalLM(config).eval()  # type checkers misread its wrapped `to`
    return cast(PreTrainedModel, model.to(torch.device(device), DTYPE))


def bench_core(
    sizes: Sequence[str] = tuple(SIZES),
    repeats: int = 5,
    device: str = "cpu",
    threads: int = 2,
    log: Log = no_log,
) -> BenchReport:
    """Time four things on models with random weights.

    1. The core (a round's time outside target and drafter), as a share of the target's pass.
    2. Our lookup drafter against transformers' prompt lookup.
    3. A batch of 8 against a batch of 1.
    4. A drafter that is always wrong against decoding without drafts.

    sizes: keys of `SIZES`. repeats: timed pairs of calls.
    Raises: MmdecError if tokens differ from those of plain `generate`.
    """
    torch_device = prepared(device, threads)
    largest = sizes[-1]
    rows = []
    for size in sizes:
        log(f"lookup against prompt lookup: {size}")
        rows += [_lookup(size, text, repeats, device) for text in TEXTS]
    log(f"batches, the core's share and a drafter that is always wrong: {', '.join(sizes)}")
    quantities = _core_share(largest, device), _batch(largest, repeats, device)
    rows += [_wrong(size, repeats, device) for size in sizes]
    return BenchReport(
        bench="core",
        title="Language models, random weights, greedy",
        hardware=hardware(device=torch_device, dtype=DTYPE, batch=(1, ROWS), threads=threads),
        exactness=(Exactness("kinds of run whose tokens equal plain generate's", len(rows) + 1, len(rows) + 1),),
        comparisons=tuple(rows),
        quantities=quantities,
        not_measured={"acceptance": "random weights say nothing of it: two kinds of text bound it"},
        details={"what": f"random weights, greedy, {PROMPT} + {NEW_TOKENS} tokens, wall clock of whole calls"},
    )


def _prompts(model: PreTrainedModel, batch: int) -> Tensor:
    """Return token ids (B, PROMPT): each row is a random phrase, repeated four times."""
    generator = torch.Generator().manual_seed(1)
    phrase = torch.randint(3, model.config.vocab_size, (batch, PROMPT // 4), generator=generator)
    return phrase.repeat(1, 4).to(model.device)


def _run(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    # typed as `Any`, because `PreTrainedModel` does not declare `generate`
    mask, network = torch.ones_like(ids), cast(Any, model)
    return network.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def _equal(a: Callable[[], Tensor], b: Callable[[], Tensor]) -> None:
    """Raise MmdecError if two calls return different tokens: then they must not be timed."""
    if not torch.equal(a(), b()):
        raise MmdecError("The drafted run differs from plain decoding: no timing is reported. Report this as a bug.")


def _core_share(size: str, device: str) -> Quantity:
    """Measure the core, a round's time outside target and drafter, in percent of the target's pass. Drafts have 16
    nodes, root included, of random tokens, so almost none is accepted. size: a key of `SIZES`."""
    model = random_model(size, device=device)
    drafter = Noise(model.config.vocab_size)
    generation = generate(
        model, _prompts(model, 1), drafter, num_speculative_tokens=15, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    rounds = generation.rounds[4:]  # the first four rounds also allocate memory, so they are left out
    low, middle, high = quartiles([100 * round_.core / round_.target for round_ in rounds])
    return Quantity(f"{size}: the core's time over the target's pass", middle, "%", len(rounds), low, high)


def _lookup(size: str, text: str, repeats: int, device: str) -> Comparison:
    """Time our lookup drafter against transformers' prompt lookup. size: a key of `SIZES`. text: a key of `TEXTS`."""
    model = random_model(size, text, device)
    ids = _prompts(model, 1)
    rounds: list[Round] = []
    plug = speculate("lookup", on_round=rounds.append, statistics=DecodingStatistics())

    def drafted() -> Tensor:
        rounds.clear()
        return _run(model, ids, custom_generate=plug)

    def stock() -> Tensor:
        return _run(model, ids, **LOOKUP.options)

    plain = _run(model, ids)
    for run in (drafted, stock):
        _equal(run, lambda: plain)
    found = paired(drafted, stock, repeats, model.device)
    per_round = (NEW_TOKENS - 1) / max(len(rounds) - 1, 1)
    return found.row("lookup", LOOKUP.name, f"{size}, {text} text", "all", WALL, tokens_per_round=per_round)


def _batch(size: str, repeats: int, device: str) -> Quantity:
    """Divide the tokens per second of a batch of `ROWS` by those of a batch of one, with the same drafter."""
    model = random_model(size, device=device)
    ids = _prompts(model, ROWS)
    plug = speculate("lookup", statistics=DecodingStatistics())

    def batched() -> Tensor:
        return _run(model, ids, custom_generate=plug)

    def single() -> Tensor:
        return _run(model, ids[:1], custom_generate=plug)

    _equal(batched, lambda: _run(model, ids))
    result = paired(batched, single, repeats, model.device)
    name = f"{size}: tokens a second of {ROWS} rows over those of one"
    return Quantity(name, ROWS * result.ratio, "times", result.n)


def _wrong(size: str, repeats: int, device: str) -> Comparison:
    """Time an always wrong drafter, with learned draft sizes, against plain `generate`. size: a key of `SIZES`."""
    model = random_model(size, device=device)
    ids = _prompts(model, 1)
    statistics = DecodingStatistics()
    plug = speculate(Noise(model.config.vocab_size), statistics=statistics)

    def drafted() -> Tensor:
        statistics.clear()  # forget earlier measurements, so that each call must learn again that the drafter is wrong
        return _run(model, ids, custom_generate=plug)

    def plain() -> Tensor:
        return _run(model, ids)

    _equal(drafted, plain)
    found = paired(plain, drafted, repeats, model.device)
    return found.turned().row("always wrong", "plain generate", size, "all", WALL)
