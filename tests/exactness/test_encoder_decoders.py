"""Tests transformers' encoder-decoders end to end: with any draft, the tokens equal those of `generate`."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.families import ENCODER_DECODER_FAMILIES
from mmdec.targets.registry import make_target
from mmdec.types import Needs
from tests.exactness.pairwise import cover, each_value
from tests.support.encoder_decoders import BART, CLASSES, VOCABULARY, attentions, encoder_decoder, sources
from tests.support.grid import WHOLE, slow_but
from tests.support.random_drafter import RandomDrafter

ENDS = [2, 5, 9]  # texts of different lengths
GRID = {
    "family": list(CLASSES),
    "drafter": ["lookup", "recycling", "wild"],
    "nodes": [None, 1, 5, (12, 4), (24, 6)],
    "batch": [1, 4],
    "sampled": [False, True],
}
CASES = cover(GRID, WHOLE)


def drafter(name: str, expected: Tensor, nodes: Any) -> Any:
    return RandomDrafter(0.3, expected.tolist(), 0.9) if name == "wild" else name


def decode_both_ways(
    model: Any, inputs: dict[str, Any], name: str, nodes: Any, sampled: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the text of plain decoding and the text with drafts."""
    options = {"max_new_tokens": 22, "eos_token_id": ENDS, "do_sample": sampled, **options}
    batch, seed = len(inputs["attention_mask"]), 3 if sampled else None
    if sampled and batch > 1:  # draws for each row, as with no drafter
        plain = mmdec.speculate(None, seed=seed)
        expected = model.generate(**inputs, **options, custom_generate=plain)
        plug = mmdec.speculate(drafter(name, expected, nodes), num_speculative_tokens=nodes, seed=seed)
        return expected, model.generate(**inputs, **options, custom_generate=plug)
    torch.manual_seed(7)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(7)
    plug = mmdec.speculate(drafter(name, expected, nodes), num_speculative_tokens=nodes)
    return expected, model.generate(**inputs, **options, custom_generate=plug)


@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_drafts_change_no_text(case: dict[str, Any]) -> None:
    for attention in attentions(case["family"]):
        model = encoder_decoder(case["family"], attention)
        inputs = sources(model, case["batch"])
        expected, result = decode_both_ways(model, inputs, case["drafter"], case["nodes"], case["sampled"])
        assert torch.equal(result, expected)


def test_every_family_is_in_the_grid() -> None:
    assert all(any(name.startswith(family) for name in CLASSES) for family in ENCODER_DECODER_FAMILIES.split())


@pytest.mark.parametrize("family", CLASSES)
def test_a_tree_is_scored_like_its_paths(family: str) -> None:
    """In float64: with the right positions a node differs from its path by rounding alone, here to float32."""
    model = encoder_decoder(family, seed=1).double()
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in sources(model, 3).items()}
    wanted = model.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=ENDS)
    plug = mmdec.speculate(RandomDrafter(0.5, wanted.tolist(), 0.7), num_speculative_tokens=(20, 5))
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": ENDS, "output_logits": True}
    expected = model.generate(**inputs, **options, return_dict_in_generate=True)
    result = model.generate(**inputs, **options, return_dict_in_generate=True, custom_generate=plug)
    assert torch.equal(result.sequences, expected.sequences)
    for own, others in zip(result.logits, expected.logits, strict=True):
        live = own.abs().amax(1) > 0  # zeros after a row's end
        assert (own[live] - others[live]).abs().max() < 1e-6 * others.abs().max()


@pytest.mark.parametrize("family", ["T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel"])
@pytest.mark.parametrize("batch", [1, 3])
def test_generate_and_custom_generate_agree(family: str, batch: int) -> None:
    model = encoder_decoder(family)
    inputs = sources(model, batch)
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": ENDS}
    expected = model.generate(**inputs, **options)
    result = mmdec.generate(model, inputs, "lookup", num_speculative_tokens=6, **options)
    assert torch.equal(result.sequences, expected)
    rows: list[list[int]] = [[] for _ in range(batch)]
    for round_ in mmdec.stream(model, inputs, "recycling", num_speculative_tokens=(8, 3), **options):
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            rows[row] += tokens
    assert all(expected[row, 1 : 1 + len(tokens)].tolist() == tokens for row, tokens in enumerate(rows))


def test_sound_goes_through_the_call() -> None:
    model = encoder_decoder("MoonshineForConditionalGeneration")
    inputs = sources(model, 3)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": ENDS}
    result = mmdec.generate(model, inputs, "recycling", num_speculative_tokens=5, **options)
    assert torch.equal(result.sequences, model.generate(**inputs, **options))
    with pytest.raises(InputError, match="input_values"):
        mmdec.generate(model, {"input_ids": torch.ones(1, 3, dtype=torch.long)})
    with pytest.raises(InputError, match="must hold the sound"):
        mmdec.generate(model, {"input_values": torch.ones(1, 3, dtype=torch.long)})


@pytest.mark.parametrize("batch", [1, 3])
def test_the_output_object_is_the_models_own(batch: int) -> None:
    model = encoder_decoder("T5ForConditionalGeneration", "eager")
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    inputs = sources(model, batch)
    expected = model.generate(**inputs, **options)
    result = model.generate(**inputs, **options, custom_generate=mmdec.speculate("lookup", num_speculative_tokens=4))
    assert torch.equal(result.sequences, expected.sequences)
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        for own, others in zip(result[name], expected[name], strict=True):
            assert all(
                torch.allclose(value, expected_value, atol=1e-4)
                for value, expected_value in zip(own, others, strict=True)
            )
    assert result[CACHE_ARGUMENT].get_seq_length() == expected[CACHE_ARGUMENT].get_seq_length()


def test_a_prompt_of_the_decoder_may_be_padded() -> None:
    for family in ("T5ForConditionalGeneration", "BartForConditionalGeneration", "M2M100ForConditionalGeneration"):
        model = encoder_decoder(family)
        prompt = torch.tensor([[7, 8, 9, 7], [0, 0, 5, 6], [0, 4, 4, 4]])
        inputs = {**sources(model, 3), "decoder_input_ids": prompt, "decoder_attention_mask": (prompt > 0).long()}
        expected, result = decode_both_ways(model, inputs, "wild", (12, 4), False)
        assert torch.equal(result, expected), family
    inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 0]] * 3)
    with pytest.raises(InputError, match="1 at the end of every row"):
        decode_both_ways(model, inputs, "lookup", 4, False)


def test_samples_of_one_source_equal_those_without_drafts() -> None:
    model = encoder_decoder("BartForConditionalGeneration")
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 12, "seed": 3}
    plain = mmdec.generate(model, sources(model, 2), None, **options).sequences
    assert torch.equal(mmdec.generate(model, sources(model, 2), "lookup", **options).sequences, plain)
    assert len(plain) == 8


def test_the_source_is_known_where_its_tokens_are_the_texts() -> None:
    model = encoder_decoder("T5ForConditionalGeneration")
    target, ids = make_target(model), torch.tensor([[4, 5, 6, 0], [7, 8, 9, 10]])
    _, held = target.split_inputs({"input_ids": ids, "attention_mask": (ids > 0).long()})
    states = torch.randn(4, 4, 32)
    inputs = {"input_ids": torch.zeros(4, 1, dtype=torch.long), "encoder_outputs": (states,), **held}
    context = target.prefill(inputs, Needs()).context
    assert context.source == [[4, 5, 6], [4, 5, 6], [7, 8, 9, 10], [7, 8, 9, 10]]
    apart = encoder_decoder("MarianMTModel", share_encoder_decoder_embeddings=False)
    assert make_target(apart).split_inputs({"input_ids": ids})[1] == {}


def copier() -> Any:
    """Return a BART that has learned to say its source again, in some 250 steps."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        small = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32)
        small |= {f"{side}_{part}": 1 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
        special = {**BART, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "dropout": 0.0, "init_std": 0.2}
        config = transformers.BartConfig(**{**special, **small, "vocab_size": 16})
        model: Any = transformers.BartForConditionalGeneration(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=250)
        for _ in range(250):
            ids = torch.randint(3, 16, (32, 8))
            ids[:, -1] = 1
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def test_a_text_that_copies_its_source_takes_few_rounds() -> None:
    model, ids = copier(), torch.randint(3, 16, (4, 8), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = 1
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    assert (expected[:, 1:9] == ids).float().mean() > 0.9
    rounds: list[Any] = []
    plug = mmdec.speculate("lookup", num_speculative_tokens=8, on_round=rounds.append)
    assert torch.equal(model.generate(ids, **options, custom_generate=plug), expected)
    result = mmdec.generate(model, ids, "lookup", num_speculative_tokens=8, **options)
    assert torch.equal(result.sequences, expected)
    assert 2 * len(result.rounds) <= len(rounds)  # `model.generate` does not tell a loop the source


def test_unsupported_options_raise_an_input_error() -> None:
    switch = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=16, d_ff=16, num_layers=2, num_heads=2
    )
    with pytest.raises(InputError, match=r"SwitchTransformers.*These work: Whisper, Bart"):
        make_target(transformers.SwitchTransformersForConditionalGeneration(switch))
    model = encoder_decoder("T5ForConditionalGeneration")
    with pytest.raises(InputError, match="num_beams"):
        mmdec.generate(model, sources(model, 1), num_beams=3)
    with pytest.raises(InputError, match=r"must be as `input_ids`, \(2, 15\)"):
        mmdec.generate(model, {**sources(model, 2), "attention_mask": torch.ones(1, 15, dtype=torch.long)})
    text = {"input_ids": torch.zeros(1, 97, dtype=torch.long), "encoder_outputs": (torch.zeros(1, 2, 32),)}
    with pytest.raises(InputError, match="at most 96"):
        make_target(encoder_decoder("BartForConditionalGeneration")).prefill(text, Needs())
    with pytest.raises(InputError, match="Leave the others out"):
        make_target(model).prefill({**text, "labels": torch.zeros(1)}, Needs())
