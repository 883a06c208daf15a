"""Tests that repeated calls do not repeat the set-up: the target's checks would take much of a short answer's time."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mmdec
from mmdec.core.tree import chain_drafts
from mmdec.drafters.ctc.tokens import Merges, TokenPieces
from mmdec.drafters.lookup import LookupDrafter
from mmdec.errors import InputError
from mmdec.pretrained.vlm import load_vlm
from mmdec.targets.media import MediaTarget
from mmdec.types import Needs
from tests.support.families import model_of
from tests.support.measurements import measurements
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm import KINDS, Picture, batch_of, vision_model
from tests.support.tiny_vlm_folder import write


@pytest.fixture
def made_targets(monkeypatch: pytest.MonkeyPatch) -> list[MediaTarget]:
    """Return the targets that were made."""
    targets: list[MediaTarget] = []
    make = MediaTarget.__init__

    def count_target(self: MediaTarget, model: Any) -> None:
        targets.append(self)
        make(self, model)

    monkeypatch.setattr(MediaTarget, "__init__", count_target)
    return targets


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_makes_its_target_once(kind: str, made_targets: list[MediaTarget]) -> None:
    model = vision_model(kind)
    inputs = batch_of(kind, [[[8, 9, 8, 9], Picture.random(1), [8, 9]]])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(**inputs, **options)  # type: ignore[operator] # mixed in
    assert made_targets == []
    assert torch.equal(mmdec.generate(model, inputs, **options).sequences, plain)
    assert len(made_targets) == 1
    assert list(mmdec.stream(model, inputs, **options))
    assert len(made_targets) == 2
    assert torch.equal(model.generate(**inputs, **options, custom_generate=mmdec.speculate()), plain)  # type: ignore[operator] # mixed in
    assert len(made_targets) == 3


def test_a_description_makes_its_target_once_when_its_drafter_is_known(
    tmp_path: Path, made_targets: list[MediaTarget]
) -> None:
    vlm = load_vlm(write(tmp_path / "tiny"), "cpu")
    picture = torch.zeros(24, 40, 3, dtype=torch.uint8).numpy()
    first = mmdec.describe(picture, model=vlm, max_new_tokens=3)
    del made_targets[:]
    assert mmdec.describe(picture, model=vlm, max_new_tokens=3).tokens == first.tokens
    assert len(made_targets) == 1


def test_a_dtype_is_the_loaded_models_own() -> None:
    model, ids = language_model(), torch.tensor([[3, 4, 5]])
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **options)  # type: ignore[operator]
    assert torch.equal(mmdec.generate(model, ids, dtype="float32", **options).sequences, expected)
    for entry_point in (mmdec.generate, mmdec.stream):
        with pytest.raises(InputError, match=r"`dtype` must be that of .*float32, but is bfloat16"):
            entry_point(model, ids, dtype="bfloat16", **options)


def test_other_objects_are_refused_as_models() -> None:
    with pytest.raises(InputError, match="`model` must be a loaded model of transformers, but is 'llama'"):
        mmdec.generate("llama", torch.tensor([[1, 2]]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_mask", torch.full((1, 4), 2)),
        ("attention_mask", torch.full((1, 4), float("nan"))),
        ("attention_mask", torch.ones(2, 4)),
        ("prefix_allowed_tokens_fn", 3),
        ("bad_words_ids", [[10**7]]),
        ("sequence_bias", {(10**7,): -1.0}),
        ("forced_eos_token_id", 10**7),
    ],
)
def test_odd_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError):
        mmdec.generate(model_of("LlamaForCausalLM"), {"input_ids": torch.tensor([[5, 6, 7, 8]])}, **{name: value})


def test_rounds_have_a_public_name() -> None:
    rounds = list(mmdec.stream(model_of("LlamaForCausalLM"), torch.tensor([[5, 6, 7, 8]]), max_new_tokens=3))
    assert {type(round_) for round_ in rounds} == {mmdec.Round}


def test_fractional_max_new_tokens_round_as_in_generate() -> None:
    model, ids = model_of("LlamaForCausalLM"), torch.tensor([[5, 6, 7, 8]])
    options: dict[str, Any] = {"max_new_tokens": 2.5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)  # type: ignore[operator] # mixed in
    assert torch.equal(mmdec.generate(model, ids, **options).sequences, expected)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize(
    "drafter", ["lookup", "recycling", "auto", None, "mmdec.drafters.lookup:LookupDrafter", "model", LookupDrafter()]
)
def test_a_custom_loop_goes_to_a_worker_process(copied: Any, drafter: Any) -> None:
    model, ids = language_model(), torch.tensor([[3, 4, 5, 3, 4, 5]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)  # type: ignore[operator] # mixed in
    loop = mmdec.speculate(language_model() if drafter == "model" else drafter, statistics=mmdec.DecodingStatistics())
    for used in range(2):  # before its first call and after it, when drafters are made
        result = model.generate(ids, **options, custom_generate=copied(loop))  # type: ignore[operator] # mixed in
        assert torch.equal(result, expected)
        if not used:
            model.generate(ids, **options, custom_generate=loop)  # type: ignore[operator] # mixed in


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_pieces_of_a_head_go_to_a_worker_process(copied: Any) -> None:
    """Their caches are not sent."""
    merges = Merges([(104, 105, 256)], list(range(256)))
    pieces = TokenPieces(merges, [*range(256), 256])
    assert merges.words(b"hi") == (256,)
    assert pieces.of_token(256)
    result = copied(pieces)
    assert (result.merges.words(b"hi"), result.of_token(256)) == ((256,), pieces.of_token(256))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_statistics_are_copied_with_what_they_measured(copied: Any) -> None:
    statistics, model = mmdec.DecodingStatistics(), language_model()
    mmdec.generate(model, torch.tensor([[3, 4, 5, 3]]), "lookup", statistics=statistics, max_new_tokens=9)
    assert measurements(copied(statistics)) == measurements(statistics)
    assert statistics._pairs


class Fixed:
    """A drafter that always proposes the same token, or nothing."""

    needs, name = Needs(), "fixed"

    def __init__(self, token: int | None) -> None:
        self.token = token

    def check(self, target: Any) -> None:
        pass

    def start(self, context: Any) -> None:
        pass

    def update(self, state: Any, draft: Any, scores: Any, verdict: Any) -> None:
        pass

    def select(self, state: Any, live: Any) -> None:
        pass

    def propose(self, state: Any, roots: torch.Tensor, plan: Any) -> Any:
        return chain_drafts(roots, [[] if self.token is None else [self.token]] * len(roots))


def notes(model: Any, drafter: Any, tokens: int = 24) -> list[str]:
    """List the warnings of a call of `tokens` rounds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        mmdec.generate(model, torch.tensor([[3, 4, 5]]), drafter, num_speculative_tokens=1, **options)
    return [str(each.message) for each in caught if "brought" in str(each.message)]


def unwritten(model: Any) -> int:
    """Return a token that greedy decoding never writes."""
    written = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=40, min_new_tokens=40, do_sample=False)
    return next(token for token in range(5, 40) if token not in written[0, 3:].tolist())


def test_a_drafter_that_is_never_right_warns_once() -> None:
    model = language_model()
    (note,) = notes(model, Fixed(unwritten(model)))
    assert note.startswith("drafter 'fixed' brought 0 tokens in 23 rounds, of 22 drafted: it may have been made for")
    assert notes(model, Fixed(unwritten(model))) == []


def test_a_drafter_that_proposes_nothing_is_noted() -> None:
    (note,) = notes(language_model(), Fixed(None))
    assert "of 0 drafted: it proposed nothing" in note


def test_short_calls_and_drafters_that_are_right_have_no_note() -> None:
    model = language_model()
    assert notes(model, Fixed(unwritten(model)), 19) == []
    assert notes(model, model) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slow_half_precision_on_a_cpu_is_named_as_the_cause(dtype: torch.dtype) -> None:
    model = language_model().to(dtype)
    (note,) = notes(model, Fixed(unwritten(model)))
    assert f"in {str(dtype)[6:]} most CPUs" in note
    assert 'dtype="float32"' in note


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_truncated_rows_are_named(drafter: str | None) -> None:
    model, prompts = language_model("llama"), torch.tensor([[3, 4, 5, 3, 4], [9, 8, 7, 9, 8]])
    plain = mmdec.generate(model, prompts, drafter=drafter, max_new_tokens=6, eos_token_id=None)
    assert plain.finish_reasons == ["length", "length"]
    assert plain.note == "2 rows cut at 6 tokens; set `max_new_tokens`"
    end = int(plain.sequences[0, -1])  # the first row may end with it even at the last position
    out = mmdec.generate(model, prompts, drafter=drafter, max_new_tokens=6, eos_token_id=end, pad_token_id=0)
    expected = ["stop" if end in row else "length" for row in plain.sequences[:, 5:].tolist()]
    assert out.finish_reasons == expected
    assert expected[0] == "stop"


def test_copies_share_the_warnings_of_a_loop() -> None:
    """A picture's group, a turn of a chat and a window of a stream each have a copy of their call's loop."""
    model, loop = language_model(), mmdec.speculate("lookup")
    options: dict[str, Any] = {
        "max_new_tokens": 2,
        "do_sample": False,
        "logits_processor": [lambda ids, scores: scores],
    }
    copies = [loop.with_drafter(LookupDrafter(), 4), loop.with_seed(3), loop.with_drafter(LookupDrafter())]
    assert [copy_.options.num_speculative_tokens for copy_ in copies] == [4, None, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (loop, *copies):
            model.generate(torch.tensor([[3, 4, 5], [5, 4, 3]]), **options, custom_generate=each)  # type: ignore[operator] # mixed in
    assert sum("falling back" in str(warning.message) for warning in caught) == 1
