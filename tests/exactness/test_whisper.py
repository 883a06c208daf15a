"""Tests Whisper with drafts in float32: tokens equal those of `generate`. A pairwise cover; all with MMDEC_ALL=1."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.errors import InputError
from mmdec.generation.speculation import default_statistics
from mmdec.targets.registry import make_target
from tests.exactness.pairwise import cover, each_value
from tests.support.grid import WHOLE, slow_but
from tests.support.tiny_whisper import (
    EOT,
    TIMESTAMPS,
    VOCABULARY,
    sound,
    whisper,
)
from tests.support.whisper_calls import (
    MODELS,
    MODES,
    PLAIN,
    SHAPES,
    SPOKEN,
    KnownTextDrafter,
    Mode,
    assert_same,
    call,
    ctc,
    heads,
    plug,
    stock,
    windows,
)

pytestmark = [  # transformers' own: on numpy 2, and for word timestamps of windows that say next to nothing
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:std:UserWarning"),
]


GRID = {
    "mode": list(MODES),
    "drafter": ["lookup", "recycling", "linear", "block", "right", "wrong", "babbling", "random", "marks"],
    "nodes": [None, 5, (14, 4)],
    "batch": [1, 3, 8],
    "mels": [80, 128],
    "attention": ["sdpa", "eager"],
}
CASES = cover(GRID, WHOLE)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    default_statistics().clear()
    yield
    for network in MODELS.values():
        network.set_attn_implementation("sdpa")


def drafter(case: dict[str, Any]) -> Any:
    name, network = case["drafter"], MODELS[case["mels"]]
    if name in SHAPES:
        return MedusaDrafter(heads(name), network.proj_out)
    if name in ("babbling", "random", "marks"):
        return ctc(name)
    if name in ("right", "wrong"):
        texts = windows(case["mels"], case["mode"], case["batch"])
        return KnownTextDrafter(texts, name == "right", isinstance(case["nodes"], tuple))
    return name


@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_drafts_change_no_text(case: dict[str, Any]) -> None:
    network = MODELS[case["mels"]]
    network.set_attn_implementation(case["attention"])
    wanted = stock(case["mels"], case["mode"], case["batch"], case["attention"])
    custom = plug(drafter(case), case["nodes"])
    network.set_attn_implementation(case["attention"])
    assert_same(call(network, MODES[case["mode"]], case["batch"], custom_generate=custom), wanted)


@dataclass
class Passes:
    """Counts the decoder's passes after each window's prompt, and remembers the last position asked for."""

    count: int = 0
    last: int = 0

    def __call__(self, module: Any, args: Any, given: dict[str, Any]) -> None:
        if given.get(CACHE_ARGUMENT) is not None and given[CACHE_ARGUMENT].get_seq_length():
            self.count += 1
        self.last = max(self.last, int(given["position_ids"].max()))


@contextmanager
def watched(network: WhisperForConditionalGeneration) -> Iterator[Passes]:
    passes = Passes()
    handle = network.model.decoder.register_forward_pre_hook(passes, with_kwargs=True)
    yield passes
    handle.remove()


def size(text: list[int]) -> int:
    """Tokens of a row, its end included."""
    return 1 + text.index(EOT) if EOT in text else len(text)


@pytest.mark.parametrize("bushy", [False, True])
@pytest.mark.parametrize(("mode", "batch"), [("short", 1), ("short", 4), ("long", 2)])
def test_passes_are_as_few_as_the_drafts_are_good(mode: str, batch: int, bushy: bool) -> None:
    texts = windows(80, mode, batch)
    prompt = 4 if mode == "short" else 3  # SOT, language, task, no timestamps
    lengths = [[size(row[prompt:].tolist()) for row in rows] for rows in texts]
    for depth in (2, 6):
        nodes = (2 * depth, depth) if bushy else depth
        for right in (True, False):
            with watched(MODELS[80]) as passes:
                call(MODELS[80], MODES[mode], batch, custom_generate=plug(KnownTextDrafter(texts, right, bushy), nodes))
            gain = depth + 1 if right else 1
            assert passes.count == sum(max(math.ceil((length - 1) / gain) for length in rows) for rows in lengths)


@pytest.mark.parametrize(
    ("mels", "batch", "nodes"), [(80, 2, 1), (80, 2, 2), (80, 2, 3), (80, 2, 7), (128, 5, 4), (128, 5, 20)]
)
def test_drafts_with_ends_and_timestamp_pairs_anywhere_equal_stock(mels: int, batch: int, nodes: int) -> None:
    """All of a window is drafted: its end, the length limit and the pairs of timestamps fall on every node in turn."""
    texts = windows(mels, "long", batch)
    tokens = [token for rows in texts for row in rows.tolist() for token in row[3:]]
    assert EOT in tokens
    assert any(token >= TIMESTAMPS <= following for token, following in pairwise(tokens))
    assert any(EOT not in row[3:] for rows in texts for row in rows.tolist())  # cut by length
    found = call(MODELS[mels], MODES["long"], batch, custom_generate=plug(KnownTextDrafter(texts, True, False), nodes))
    assert_same(found, stock(mels, "long", batch, "sdpa"))


@pytest.mark.parametrize("nodes", [3, (12, 3)])
def test_no_position_beyond_the_last_is_asked_for(nodes: Any) -> None:
    mode = Mode(options=PLAIN | {"language": "en", "max_new_tokens": 60, "eos_token_id": VOCABULARY - 1})
    wanted = call(MODELS[80], mode, 3)
    assert wanted.shape == (3, 60)
    for name in ("recycling", "linear"):
        proposing = name if name == "recycling" else MedusaDrafter(heads("linear"), MODELS[80].proj_out)
        with watched(MODELS[80]) as passes:
            assert torch.equal(call(MODELS[80], mode, 3, custom_generate=plug(proposing, nodes)), wanted)
        assert passes.last < MODELS[80].config.max_target_positions


@pytest.mark.parametrize(("name", "seed"), [("lookup", 0), ("linear", 1), ("block", 2), ("right", 1)])
def test_the_fallback_ladder_draws_the_same_numbers(name: str, seed: int) -> None:
    """Greedy first; where the text repeats itself or is improbable, hotter and hotter."""
    network = MODELS[80]
    options = SPOKEN | {
        "temperature": (0.0, 0.4, 1.0),
        "logprob_threshold": -1.0,
        "compression_ratio_threshold": 1.0,
        "no_speech_threshold": 0.9,
    }
    temperatures = []

    def listen(model: Any, input_ids: Tensor, generation_config: Any, **given: Any) -> Any:
        temperatures.append(generation_config.temperature if generation_config.do_sample else 0.0)
        texts.append(model._sample(input_ids, generation_config=generation_config, **given))
        return texts[-1]

    texts = list[Any]()
    inputs = sound(1, 1.5, 80, seed)
    torch.manual_seed(seed)
    wanted = network.generate(**inputs, **options, max_new_tokens=12, custom_generate=listen)
    assert set(temperatures) >= {0.0, 0.4}
    torch.manual_seed(seed)
    again = network.generate(**inputs, **options, max_new_tokens=12)
    assert_same(wanted, again)
    proposing = {
        "linear": lambda: MedusaDrafter(heads("linear"), network.proj_out),
        "block": lambda: MedusaDrafter(heads("block"), network.proj_out),
        "right": lambda: KnownTextDrafter([text.sequences for text in texts], True, False),
    }.get(name, lambda: name)()
    torch.manual_seed(seed)
    assert_same(network.generate(**inputs, **options, max_new_tokens=12, custom_generate=plug(proposing, 4)), wanted)


def test_begin_suppression_forces_the_first_token_and_it_alone() -> None:
    for forced in (7, EOT):
        options = PLAIN | {"language": "en", "begin_suppress_tokens": [t for t in range(VOCABULARY) if t != forced]}
        mode = Mode(options=options)
        wanted = call(MODELS[80], mode, 2)
        assert wanted.shape[1] == 0 if forced == EOT else (wanted[:, 0] == forced).all()
        for name in ("lookup", "recycling"):
            assert torch.equal(call(MODELS[80], mode, 2, custom_generate=plug(name, 6)), wanted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_are_those_of_generate(batch: int, attention: str) -> None:
    """Scores to the end of each row; attentions (none of "sdpa"), hidden states and the cache everywhere."""
    network = MODELS[80]
    network.set_attn_implementation(attention)
    mode = Mode(
        options=MODES["short"].options
        | dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
        | dict.fromkeys(("output_attentions", "output_hidden_states"), True)
    )
    wanted = call(network, mode, batch)
    found = call(network, mode, batch, custom_generate=plug("lookup", 5))
    assert type(found) is type(wanted)
    assert torch.equal(found.sequences, wanted.sequences)
    ends = [row[4:].tolist().index(EOT) if EOT in row[4:] else len(row) - 4 for row in wanted.sequences]
    assert max(ends) > 8
    for name in ("scores", "logits"):
        assert len(found[name]) == len(wanted[name])
        for step, (scores, stock_scores) in enumerate(zip(found[name], wanted[name], strict=True)):
            rows = [row for row, end in enumerate(ends) if step <= end]
            torch.testing.assert_close(scores[rows], stock_scores[rows], rtol=1e-4, atol=1e-4)
    assert set(found) == set(wanted)
    for name in ("cross_attentions", "decoder_attentions", "decoder_hidden_states", "encoder_attentions"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-4)
    for part in ("self_attention_cache", "cross_attention_cache"):
        for layer, stock_layer in zip(
            getattr(found[CACHE_ARGUMENT], part).layers, getattr(wanted[CACHE_ARGUMENT], part).layers, strict=True
        ):
            torch.testing.assert_close(layer.keys, stock_layer.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.values, stock_layer.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams"),
        # transformers' speech pipeline asks for beams that its caller never wrote
        ({"num_beams": 5}, r'pipeline\("automatic-speech-recognition"\) .* generate_kwargs=\{"num_beams": 1, '),
        ({"cache_implementation": "static"}, "cache"),
    ],
)
def test_unsupported_options_raise_an_input_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        call(MODELS[80], MODES["short"], 1, custom_generate=mmdec.speculate("lookup"), **options)


def test_generate_and_stream_point_to_transcribe() -> None:
    with pytest.raises(InputError, match="custom_generate"):
        mmdec.generate(MODELS[80], sound(1)["input_features"])


def test_heads_for_another_whisper_are_refused() -> None:
    with pytest.raises(InputError, match="output"):
        MedusaDrafter(heads("linear", vocab_size=VOCABULARY + 1), MODELS[80].proj_out)
    other = whisper(80, 0, d_model=48)
    with pytest.raises(InputError, match="channels"):
        call(
            other,
            MODES["short"],
            1,
            custom_generate=mmdec.speculate(MedusaDrafter(heads("linear"), MODELS[80].proj_out)),
        )


@pytest.mark.parametrize(
    ("batch", "mode"),
    slow_but(product((1, 3), ("short", "conditioned")), [(3, "short"), (1, "conditioned")]),
)
def test_a_smaller_whisper_drafts_over_the_large_ones_encoder(mode: str, batch: int) -> None:
    small = whisper(80, 4, decoder_layers=1)
    for drafting in (small, mmdec.small_model(MODELS[80], inner="lookup"), MODELS[80]):
        rounds: list[Any] = []
        custom = plug(drafting, 4, on_round=rounds.append)
        assert_same(call(MODELS[80], MODES[mode], batch, custom_generate=custom), stock(80, mode, batch, "sdpa"))
    assert sum(map(sum, (round_.accepted for round_ in rounds))) > 10  # the model itself is a good drafter
    other = whisper(80, 4, vocab_size=VOCABULARY - 1)
    with pytest.raises(InputError, match="tokens"):
        call(MODELS[80], MODES[mode], batch, custom_generate=plug(other, 4))
    # One with another encoder hears for itself where it is given the sound; `generate` hands over states alone. Then it
    # drafts nothing: the texts are the large model's, one token a round.
    wide, silent = whisper(80, 4, d_model=48), list[Any]()
    custom = plug(wide, 4, on_round=silent.append)
    assert_same(call(MODELS[80], MODES[mode], batch, custom_generate=custom), stock(80, mode, batch, "sdpa"))
    assert silent
    assert not any(sum(round_.drafted) for round_ in silent)
    with pytest.raises(InputError, match="channels"):  # a decoder alone has no encoder to hear with
        SmallModelDrafter(make_target(wide), reads_encoder=True).check(make_target(MODELS[80]))
