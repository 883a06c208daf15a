"""Tests decoding with drafts end to end, in float32, on transformers' models: the tokens equal those of `generate`.

A pairwise cover of target x drafter x nodes x batch x processors; the whole grid with MMDEC_ALL=1 (`make test-all`).
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from transformers import TextStreamer
from transformers.generation import GenerateDecoderOnlyOutput

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.drafters.corpus import CorpusDrafter, TokenIndex
from mmdec.errors import InputError
from mmdec.generation.speculation import default_statistics
from tests.exactness.pairwise import cover, each_value
from tests.exactness.text_models import MODELS, SMALL, Wrong
from tests.support.draft_networks import tree_growing
from tests.support.grid import WHOLE, slow_but
from tests.support.tiny_text import VOCABULARY, language_model, prompts

PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "lengths": {"min_new_tokens": 9, "suppress_tokens": [5, 6], "begin_suppress_tokens": [7, 8]},
    "decay": {"exponential_decay_length_penalty": (6, 1.1), "bad_words_ids": [[4], [9, 10]]},
}
GRID = {
    "target": ["llama", "qwen2"],
    "drafter": [
        "lookup",
        "recycling",
        "corpus",
        "jacobi",
        "early_exit",
        "small",
        "self",
        "wrong",
        "eagle3",
        "peagle",
        "dflash",
        "dspark",
        "dflash2",
        "domino",
        "hydra++",
        "redrafter",
        "mlp",
    ],
    "nodes": [None, 0, 1, 5, 24],
    "batch": [1, 2, 5, 8],
    "processors": list(PROCESSORS),
    "attention": ["sdpa", "eager"],
}
CASES = cover(GRID, WHOLE)

OWN_TEXTS = [
    MODELS[name].generate(**prompts(1, seed), max_new_tokens=30)[0].tolist() for name in MODELS for seed in (0, 7)
]
NOISE = torch.randint(3, VOCABULARY, (500,), generator=torch.Generator().manual_seed(1)).tolist()
CORPUS = TokenIndex.from_texts([*OWN_TEXTS, NOISE])
SIMPLE = ["lookup", "recycling", "corpus", "jacobi", "early_exit", "small", "wrong"]  # drafters without training
HEADS: dict[str, dict[str, Any]] = {  # drafter -> settings of its head
    "dflash": {},
    "dspark": {"head": "rnn", "head_rank": 8, "from_anchor": True, "confidence": True},
    "dflash2": {"head": "dflash2", "head_rank": 8, "convolution_group": 8},
    "domino": {"head": "domino", "head_rank": 8, "head_state": 12, "plain_prefix": 1, "from_anchor": True},
}
STATEFUL: dict[str, dict[str, Any]] = {  # drafter -> settings of heads with a state
    "amphista": {"kind": "medusa", "attention": True, "heads": 3},
    "hydra++": {"kind": "hydra", "prefix_layer": True, "blocks": 2},
    "redrafter": {"kind": "recurrent", "lm_heads": "one"},
    "mlp": {"kind": "mlp", "inner_size": 24, "lm_heads": "each", "heads": 3},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    default_statistics().clear()
    yield
    for network in MODELS.values():
        network.set_attn_implementation("sdpa")


def drafter(name: str, target: str) -> Any:
    if name in ("eagle3", "peagle"):
        masked = {"mask_token": 3, "num_hidden_layers": 2} if name == "peagle" else {}
        return tree_growing("eagle3", MODELS[target], draft_vocab_size=VOCABULARY - 9, **masked)
    if name in HEADS:
        block = {"block_size": 6, "mask_token": 3, "num_hidden_layers": 2}
        return tree_growing("dflash", MODELS[target], **block, **HEADS[name])
    if name in STATEFUL:
        return tree_growing("heads", MODELS[target], **STATEFUL[name])
    drafters = {"small": SMALL, "self": MODELS[target], "wrong": Wrong(), "corpus": CorpusDrafter(CORPUS)}
    return drafters.get(name, name)


@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_greedy_output_is_the_models_own(case: dict[str, Any]) -> None:
    network = MODELS[case["target"]]
    network.set_attn_implementation(case["attention"])
    inputs = prompts(case["batch"])
    options = {"max_new_tokens": 26, "do_sample": False, **PROCESSORS[case["processors"]]}
    expected = network.generate(**inputs, **options)
    result = mmdec.generate(
        network, inputs, drafter(case["drafter"], case["target"]), num_speculative_tokens=case["nodes"], **options
    )
    assert torch.equal(result.sequences, expected)
    if case["drafter"] == "self" and case["nodes"] == 5 and case["processors"] == "none" and case["batch"] == 1:
        assert result.tokens_per_round > 3


@pytest.mark.parametrize(
    ("name", "attention"),
    slow_but(
        itertools.product(SIMPLE, ("sdpa", "eager")), [*((name, "sdpa") for name in SIMPLE), ("recycling", "eager")]
    ),
)
def test_sampling_at_batch_one_is_the_models_own(name: str, attention: str) -> None:
    network = MODELS["llama"]
    network.set_attn_implementation(attention)
    options: dict[str, Any] = {"max_new_tokens": 25, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    for seed in range(4):
        inputs = prompts(1, seed)
        torch.manual_seed(seed)
        expected = network.generate(**inputs, **options)
        torch.manual_seed(seed)
        result = mmdec.generate(network, inputs, drafter(name, "llama"), num_speculative_tokens=6, **options)
        assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("batch", slow_but((1, 3, 8), (3,)))
def test_keyed_sampling_does_not_depend_on_the_drafter(name: str, batch: int) -> None:
    network = MODELS["qwen2"]
    inputs = prompts(batch, 3)
    options: dict[str, Any] = {
        "max_new_tokens": 30,
        "do_sample": True,
        "repetition_penalty": 1.1,
        "top_k": 30,
        "seed": 7,
    }
    expected = mmdec.generate(network, inputs, None, **options).sequences
    for nodes in (1, 4, 13, None):
        result = mmdec.generate(network, inputs, drafter(name, "qwen2"), num_speculative_tokens=nodes, **options)
        assert torch.equal(result.sequences, expected)


def test_rows_that_start_alike_differ() -> None:
    inputs = {name: value[:1].repeat(6, 1) for name, value in prompts(1).items()}
    result = mmdec.generate(MODELS["llama"], inputs, "recycling", rule="sampled", seed=1, max_new_tokens=20).sequences
    assert len({tuple(row) for row in result.tolist()}) == 6


def test_the_drop_in_gives_what_generate_gives() -> None:
    network, inputs, rounds = MODELS["llama"], prompts(3), []
    expected = network.generate(**inputs, max_new_tokens=30, do_sample=False)
    plug = mmdec.speculate("lookup", num_speculative_tokens=5, on_round=rounds.append)
    assert torch.equal(network.generate(**inputs, max_new_tokens=30, do_sample=False, custom_generate=plug), expected)
    assert 1 < len(rounds) <= 31
    out = network.generate(
        **inputs, max_new_tokens=30, do_sample=False, custom_generate=plug, return_dict_in_generate=True
    )
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, expected)


def test_the_returned_cache_can_be_continued() -> None:
    model, ids = MODELS["llama"], torch.tensor([[1, 7, 9, 7, 9, 7]])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    plug = mmdec.speculate("lookup", num_speculative_tokens=5)
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), custom_generate=plug, return_dict_in_generate=True, **options
    )
    cache, ids = out[CACHE_ARGUMENT], out.sequences
    assert cache.get_seq_length() == ids.shape[1] - 1
    mask = torch.ones_like(ids)
    later = model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **options)  # type: ignore[operator]
    assert torch.equal(later, model.generate(ids, attention_mask=mask, **options))  # type: ignore[operator]


def test_samples_of_one_prompt_differ_from_each_other() -> None:
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 12}
    result = mmdec.generate(MODELS["llama"], prompts(1), "lookup", seed=3, **options).sequences
    assert result.shape[0] == 4
    assert len({tuple(row) for row in result.tolist()}) == 4


@pytest.mark.parametrize("rule", ["residual", "traversal"])
def test_rules_for_sampled_drafts_need_sampling_and_finish(rule: Any) -> None:
    options: dict[str, Any] = {"rule": rule, "num_speculative_tokens": 4, "max_new_tokens": 20}
    assert mmdec.generate(MODELS["llama"], prompts(3), SMALL, **options).lossless
    again, once = (mmdec.generate(MODELS["llama"], prompts(3), SMALL, seed=1, **options) for _ in range(2))
    assert torch.equal(again.sequences, once.sequences)
    with pytest.raises(InputError, match="do_sample"):
        mmdec.generate(MODELS["llama"], prompts(1), SMALL, rule=rule, do_sample=False, max_new_tokens=5)


def test_the_rule_block_names_its_successor() -> None:
    with pytest.raises(InputError, match=r"`rule` must be one of .*, but is 'block'\. Use \"traversal\"\."):
        mmdec.generate(MODELS["llama"], prompts(1), SMALL, rule="block", max_new_tokens=5)  # type: ignore[arg-type]


def test_typical_acceptance_says_that_it_is_lossy() -> None:
    result = mmdec.generate(
        MODELS["llama"], prompts(2), "recycling", rule="typical", num_speculative_tokens=8, max_new_tokens=20
    )
    assert not result.lossless


@pytest.mark.parametrize(
    "rule",
    [
        mmdec.Relaxation(tolerance=0.0),
        mmdec.Relaxation(draws=1),
        mmdec.Relaxation(groups=mmdec.TokenGroups.from_labels(range(VOCABULARY))),
    ],
    ids=["tolerance", "draws", "groups"],
)
def test_a_relaxation_says_that_it_is_lossy_and_without_any_gives_the_lossless_text(rule: mmdec.Relaxation) -> None:
    options: dict[str, Any] = {"do_sample": True, "seed": 1, "num_speculative_tokens": 4, "max_new_tokens": 20}
    relaxed = mmdec.generate(MODELS["llama"], prompts(3), SMALL, rule=rule, **options)
    assert not relaxed.lossless
    assert "lossy" in str(relaxed).lower()
    name = "sampled" if rule.draws else "residual"
    lossless = mmdec.generate(MODELS["llama"], prompts(3), SMALL, rule=name, **options)
    assert torch.equal(relaxed.sequences, lossless.sequences)


def test_a_relaxation_of_probabilities_needs_sampling() -> None:
    rule = mmdec.Relaxation(tolerance=0.1)
    assert mmdec.generate(MODELS["llama"], prompts(1), SMALL, rule=rule, max_new_tokens=5).sequences.shape[1] == 19
    with pytest.raises(InputError, match=r"`rule` must fit `do_sample`, but is 'relaxed' with do_sample=False"):
        mmdec.generate(MODELS["llama"], prompts(1), SMALL, rule=rule, do_sample=False, max_new_tokens=5)


def test_draws_serve_greedy_decoding() -> None:
    plain = mmdec.generate(MODELS["llama"], prompts(2), None, do_sample=False, max_new_tokens=20)
    for draws, equal in ((1, True), (20, False)):
        rule = mmdec.Relaxation(draws=draws)
        relaxed = mmdec.generate(
            MODELS["llama"],
            prompts(2),
            "recycling",
            rule=rule,
            num_speculative_tokens=8,
            do_sample=False,
            max_new_tokens=20,
        )
        assert torch.equal(relaxed.sequences, plain.sequences) == equal


def test_groups_must_be_those_of_the_model() -> None:
    rule = mmdec.Relaxation(groups=mmdec.TokenGroups.from_labels([0, 1, 2]))
    with pytest.raises(InputError, match=rf"`groups` must cover the model's {VOCABULARY} tokens, but cover 3"):
        mmdec.generate(MODELS["llama"], prompts(1), "lookup", rule=rule, max_new_tokens=5)


def test_the_rule_relaxed_must_say_how_far() -> None:
    with pytest.raises(InputError, match=r"`rule` must be one of .*, but is 'relaxed'\. Give a `mmdec.Relaxation`"):
        mmdec.generate(MODELS["llama"], prompts(1), SMALL, rule="relaxed", max_new_tokens=5)


def test_the_stream_holds_the_text_and_can_be_left() -> None:
    network, inputs = MODELS["llama"], prompts(2)
    expected = network.generate(**inputs, max_new_tokens=30, do_sample=False)
    tokens: list[list[int]] = [[], []]
    for round_ in mmdec.stream(network, inputs, "lookup", num_speculative_tokens=4, max_new_tokens=30, do_sample=False):
        for row, new in zip(round_.rows, round_.tokens, strict=True):
            tokens[row] += new
    for row in (0, 1):
        assert tokens[row] == expected[row, 14 : 14 + len(tokens[row])].tolist()
    running = mmdec.stream(network, inputs, "lookup", max_new_tokens=200)
    assert next(running).index == 0
    running.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"rule": "fast"}, "rule"),
        ({"drafter": "oracle"}, "drafter"),
        ({"rule": "greedy", "do_sample": True}, "do_sample"),
        ({"cache_implementation": "static"}, "cache"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"force_words_ids": [[[5, 6]]]}, "force_words_ids"),
        ({"assistant_model": SMALL, "do_sample": True}, "assistant_model"),
        ({"streamer": TextStreamer(cast(Any, None))}, r"`streamer` must be left out.*mmdec\.stream"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
)
def test_unsupported_options_raise_an_input_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        mmdec.generate(MODELS["llama"], prompts(1), max_new_tokens=5, **options)


def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    other = language_model("llama", 3, vocab_size=VOCABULARY + 4)
    with pytest.raises(InputError, match="tokens"):
        mmdec.generate(MODELS["llama"], prompts(1), other, max_new_tokens=5)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="input_ids"):
        mmdec.generate(MODELS["llama"], torch.zeros(1, 0, dtype=torch.long))


def test_negative_temperature_and_a_full_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        mmdec.generate(MODELS["llama"], prompts(1), do_sample=True, temperature=-1.0, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"max_length|max_new_tokens"):
        mmdec.generate(MODELS["llama"], prompts(1), max_length=14)


BF16_TOLERANCE = 2.0**-5  # of the top score: eight of bfloat16's steps, what reordered sums may differ by


@pytest.mark.parametrize("name", slow_but(["lookup", "recycling", "small", "wrong"], slice(2)))
def test_in_bfloat16_only_near_ties_differ(name: str) -> None:
    """Passes of other shapes round differently: where the outputs part, the two best scores must be almost equal."""
    network = language_model("llama", 4).to(torch.bfloat16)
    parted = 0
    for seed in range(6):
        inputs = prompts(1, seed)
        expected = network.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()
        proposing = copy.deepcopy(SMALL).to(torch.bfloat16) if name == "small" else drafter(name, "llama")
        result = (
            mmdec.generate(network, inputs, proposing, num_speculative_tokens=6, max_new_tokens=40, do_sample=False)
            .sequences[0]
            .tolist()
        )
        first = next(
            (place for place, pair in enumerate(zip(expected, result, strict=False)) if pair[0] != pair[1]), None
        )
        if first is None:
            assert expected == result
            continue
        parted += 1
        with torch.no_grad():
            scores = network(torch.tensor([expected[:first]])).logits[0, -1].float()
        best, second = scores.topk(2).values.tolist()
        assert best - second <= BF16_TOLERANCE * max(abs(best), 1.0)
        assert {expected[first], result[first]} <= set(scores.topk(3).indices.tolist())
    assert parted < 6  # in bfloat16 too most texts agree
