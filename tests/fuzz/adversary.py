"""Random tests of decoding with drafts: a random model of a random family, a random chat and random options.

Such a test is called an attack. The text must equal that of decoding without drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.probe import PROBE_VOCABULARY, PROBE_WINDOW
from mmdec.targets.recurrent_cache import has_states
from tests.support.every_class import make_network
from tests.support.families import attention_of, model_of
from tests.support.random_drafter import RandomDrafter

PAD = 0
SINGLE = {"XGLMForCausalLM"}  # families that do not support float64
SMALL = ("LlamaForCausalLM", "GPT2LMHeadModel", "Qwen2ForCausalLM", "OPTForCausalLM")
# calls: `mmdec.generate`, `mmdec.stream`, `custom_generate` of transformers
ENTRY_POINTS = ("generate", "stream", "custom")


@dataclass
class Report:
    """The results of several attacks."""

    rounds: int = 0
    tokens: int = 0  # number of new tokens that were compared
    turns: int = 0  # number of second and third turns, which continue from a cache
    wrong: list[str] = field(default_factory=list)  # a line for each text that differs
    families: set[str] = field(default_factory=set)  # model classes that were tested


@lru_cache(200)
def network(family: str, attention: str, double: bool, seed: int, windows: bool = False) -> Any:
    """Build a small random model. windows: whether it has sliding windows. double: float64."""
    model = make_network(family) if windows else model_of(family, seed)
    model.set_attn_implementation(attention)
    return model.double() if double else model


def attacks(seed: int) -> Iterator[random.Random]:
    """Yield a random generator for each attack, without end."""
    outer = random.Random(seed)
    while True:
        yield random.Random(outer.getrandbits(64))


def attack(rng: random.Random, family: str, report: Report, windows: int = 0) -> None:
    """Test one chat of one to three turns. windows: the prompt's greatest length, in sliding windows; 0: use a model
    without windows and a short prompt."""
    own = attention_of(family)
    attention = rng.choice((own, own, "eager", TREE_ATTENTION)) if own == "sdpa" else own
    double = attention != "eager" and family not in SINGLE and rng.random() < 0.5
    model = network(family, attention, double, 0, bool(windows))
    report.families.add(family)
    batch = rng.choice((1, 1, 2, 3, 4))
    text, mask = _prompt(rng, batch, PROBE_WINDOW * windows or 12)
    cache: Any = DynamicCache(config=model.config) if rng.random() < 0.6 else None
    for turn in range(rng.choice((1, 2, 3)) if cache is not None else 1):
        options = options_of(rng)
        try:
            expected = _wanted(model, text, mask, options, batch)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            return  # transformers' loop cannot sample either: a chunked scan of random weights may overflow
        report.turns += turn > 0
        if not _goes_on(model, mask):
            cache = None
        held = cache
        for place in range(rng.choice((1, 3, 6))):
            if place and cache is not None:
                held = None  # only the first call may change the cache
            result, rounds, call = _run(rng, model, text, mask, options, held, expected, double)
            report.rounds += rounds
            report.tokens += expected[:, text.shape[1] :].numel()
            if not torch.equal(result, expected):
                differing = result.shape != expected.shape or int((result != expected).sum())
                report.wrong.append(f"{family} {attention} {double=} {batch=} {turn=} {options} {call}: {differing}")
        text, mask = _next(rng, text, mask, expected)


def _prompt(rng: random.Random, batch: int, longest: int) -> tuple[Tensor, Tensor]:
    """Draw ids and mask (B, P): repetitive or not, padded on the left or not, seldom with a masked column inside."""
    width = rng.randint(2, longest)
    rows = []
    for _ in range(batch):
        part = [rng.randrange(3, PROBE_VOCABULARY) for _ in range(rng.randint(1, width))]
        rows.append((part * width)[:width])
    ids, mask = torch.tensor(rows), torch.ones(batch, width, dtype=torch.long)
    if rng.random() < 0.6:
        for row in range(batch):
            mask[row, : rng.randrange(width)] = 0
    if width > 4 and rng.random() < 0.1:
        mask[rng.randrange(batch), 2] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def _goes_on(model: Any, mask: Tensor) -> bool:
    """Return whether a chat may continue from its cache. Recurrent states do not tell their number of columns and
    cannot drop a padding column."""
    if not has_states(model.config):
        return True
    ends = mask.shape[1] - mask.long().argmax(1)
    return bool((mask.sum(1) == ends).all()) and any(
        isinstance(layer, DynamicLayer) for layer in DynamicCache(config=model.config).layers
    )


def options_of(rng: random.Random, vocabulary: int = PROBE_VOCABULARY) -> dict[str, Any]:
    """Draw arguments of `mmdec.generate`: lengths, end tokens, processors and sampling."""
    result: dict[str, Any] = {
        "max_new_tokens": rng.choice((1, rng.randint(2, 32), rng.randint(16, 32))),
        "pad_token_id": PAD,
        "eos_token_id": rng.sample(range(2, vocabulary), rng.choice((1, 1, 2, 5))),
        "do_sample": rng.random() < 0.35,
        "suppress_tokens": [PAD],  # because `_next` makes masks from the text
    }
    some: list[dict[str, Any]] = [
        {"repetition_penalty": rng.uniform(0.8, 1.6)},
        {"no_repeat_ngram_size": rng.randint(1, 3)},
        {"min_new_tokens": rng.randint(1, result["max_new_tokens"])},
        {"begin_suppress_tokens": rng.sample(range(2, vocabulary), 3)},
        {"bad_words_ids": [[rng.randrange(2, vocabulary)], [3, 4], [rng.randrange(2, vocabulary), 5]]},
        {"exponential_decay_length_penalty": (rng.randint(1, 6), rng.uniform(1.0, 1.5))},
        {"forced_eos_token_id": rng.randrange(2, vocabulary)},
    ]
    for option in rng.sample(some, rng.choice((0, 0, 1, 2))):
        result |= option
    if result["do_sample"]:
        result["temperature"] = rng.uniform(0.3, 2.0)
        result |= rng.choice(({}, {"top_k": rng.randint(2, 20)}, {"top_p": rng.uniform(0.2, 1.0)}, {"min_p": 0.1}))
        result["seed"] = rng.getrandbits(32)
    return result


def _wanted(model: Any, text: Tensor, mask: Tensor, options: dict[str, Any], batch: int) -> Tensor:
    """Return the text of transformers' `generate` without a cache. For sampled batches, whose random draws differ from
    mmdec's, return that of mmdec without drafts."""
    given = dict(options)
    seed = given.pop("seed", None)
    if seed is not None:
        if batch > 1:
            inputs = {"input_ids": text, "attention_mask": mask}
            return mmdec.generate(model, inputs, None, seed=seed, **given).sequences
        torch.manual_seed(seed)
    return model.generate(text, attention_mask=mask, **given)


def _run(
    rng: random.Random,
    model: Any,
    text: Tensor,
    mask: Tensor,
    options: dict[str, Any],
    cache: Any,
    expected: Tensor,
    double: bool,
) -> tuple[Tensor, int, str]:
    """Decode with drafts. Returns the sequences, the number of rounds, and a description of the call."""
    drafter, name = _drafter(rng, expected, double)
    nodes: Any = rng.choice((None, 0, 1, rng.randint(2, 24), (rng.randint(2, 24), rng.randint(1, 6))))
    entry_point = rng.choice(ENTRY_POINTS)
    given = dict(options)
    seed = given.pop("seed", None)
    speculation: dict[str, Any] = {"num_speculative_tokens": nodes}
    if seed is not None and len(text) > 1:
        speculation["seed"] = seed
    elif seed is not None:
        torch.manual_seed(seed)
    past = 0 if cache is None else cache.get_seq_length()
    new = bool(past) and rng.random() < 0.3
    shown = text[:, past:] if new and _reads_no_text(options) else text
    inputs: dict[str, Any] = {"input_ids": shown, "attention_mask": mask}
    if bool(mask.all()) and not bool((text == PAD).any()) and shown is text and rng.random() < 0.7:
        del inputs["attention_mask"]
    if cache is not None:
        inputs[CACHE_ARGUMENT] = cache
    call = f"{name} {nodes} {entry_point} cached={past} new={shown is not text} masked={'attention_mask' in inputs}"
    if entry_point == "custom":
        rounds: list[Any] = []
        plug = mmdec.speculate(drafter, on_round=rounds.append, **speculation)
        result, count = model.generate(**inputs, **given, custom_generate=plug), lambda: len(rounds)
    elif entry_point == "generate":
        out = mmdec.generate(model, inputs, drafter, **speculation, **given)
        result, count = out.sequences, lambda: len(out.rounds)
    else:
        rows: list[list[int]] = [[] for _ in shown]
        passed = list(mmdec.stream(model, inputs, drafter, **speculation, **given))
        for round_ in passed:
            for row, tokens in zip(round_.rows, round_.tokens, strict=True):
                rows[row] += tokens
        longest = max(map(len, rows))
        spoken = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        result, count = torch.cat([shown, spoken], 1), lambda: len(passed)
    return torch.cat([text[:, : text.shape[1] - shown.shape[1]], result], 1), count(), call


def _reads_no_text(options: dict[str, Any]) -> bool:
    """Return whether no processor looks at the prompt: else a call with the new ids alone would give another text."""
    return not {"repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"} & set(options)


def _drafter(rng: random.Random, expected: Tensor, double: bool) -> tuple[Any, str]:
    kind = rng.choice(("lookup", "recycling", "small", "wild", "wild", "wild"))
    if kind == "small":
        family = rng.choice(SMALL)
        return network(family, "sdpa", double, 2), f"small {family}"
    if kind == "wild":
        right = rng.choice((0.0, 0.5, 0.9, 1.0))
        return RandomDrafter(rng.random(), expected.tolist(), right), f"wild {right}"
    return kind, kind


def _next(rng: random.Random, text: Tensor, mask: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Make the next turn's prompt and mask. The padding after a row's end is masked or not, at random."""
    after = torch.ones_like(expected)
    after[:, : mask.shape[1]] = mask
    if rng.random() < 0.5:
        after[:, mask.shape[1] :] = (expected[:, mask.shape[1] :] != PAD).long()
    more = torch.tensor([[rng.randrange(3, PROBE_VOCABULARY) for _ in range(rng.choice((1, 3)))]]).repeat(len(text), 1)
    return torch.cat([expected, more], 1), torch.cat([after, torch.ones_like(more)], 1)
