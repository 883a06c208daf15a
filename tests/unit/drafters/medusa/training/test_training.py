"""Tests parts of the training of Medusa heads: the loss, simulated rounds, stored labels, prompts of any Whisper."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import WhisperFeatureExtractor

from mmdec import speculate
from mmdec.core.tree_shape import MAX_RANKS, HeadAccuracy, default_probabilities
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.medusa.network import MedusaConfig, MedusaHeads
from mmdec.drafters.medusa.training.data import (
    LANGUAGE_PLACEHOLDER,
    WindowTokenizer,
    decode_greedily,
    decoding_fingerprint,
)
from mmdec.drafters.medusa.training.module import first_heads, head_loss
from mmdec.drafters.networks.training.simulation import measure, simulate, spread
from mmdec.errors import InputError
from mmdec.training.stores import HiddenStateStore, TokenStore
from mmdec.whisper.unpadded_encoder import whisper_mel
from tests.support.tiny_whisper import LANGUAGES, NO_TIMESTAMPS, PREVIOUS, SOT, TASKS, build_tokenizer, whisper
from tests.support.tiny_whisper import sound as features


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("cells", [1, 45, 1 << 20])
def test_the_loss_is_cross_entropy_and_divergence(weight: float, cells: int) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=generator, dtype=torch.double) for shape in ((7, 4), (15, 4), (7, 4))]
    states, output, teacher = made
    states.requires_grad_()
    targets = torch.randint(15, (7,), generator=generator)
    loss, ranks = head_loss(states, output, targets, teacher, weight, cells)
    logits = states @ output.T
    expected = cross_entropy(logits, targets)
    guide = (teacher @ output.T).log_softmax(1)
    expected = expected + weight * kl_div(logits.log_softmax(1), guide, log_target=True, reduction="batchmean")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(3 * value, states)[0] for value in (loss, expected)))
    order = logits.argsort(1, descending=True)
    assert ranks.tolist() == [row.index(target) for row, target in zip(order.tolist(), targets.tolist(), strict=True)]


def test_the_loss_of_no_positions_is_zero() -> None:
    states = torch.zeros(0, 4, requires_grad=True)
    loss, _ = head_loss(states, torch.ones(5, 4), torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert float(loss.detach()) == 0.0


NEVER = MAX_RANKS


def test_rounds_are_simulated() -> None:
    right, wrong = torch.zeros(9, 3, dtype=torch.long), torch.full((9, 3), NEVER)
    chain = HeadAccuracy(default_probabilities(3)).tree(3, 3)
    assert simulate([right], chain, 3).tokens_per_round == 9 / 3  # 4, 4 and what is left, 1
    assert simulate([wrong, wrong], chain, 3).tokens_per_round == 1
    assert simulate([right], [], 3).tokens_per_round == 1
    # A root, then: the second best, the best, never. A chain fails at once; a tree that looks at ranks 0 and 1 gains 3.
    text = torch.tensor([[1, 0, NEVER]] * 3)
    tree = [(0, 0, 0), (0, 0, 1), (2, 1, 0)]
    assert (simulate([text], chain, 3).tokens, simulate([text], chain, 3).rounds) == (3, 3)
    seen = simulate([text], tree, 3)
    assert (seen.tokens, seen.rounds) == (3, 1)
    assert seen.trials == [1, 1, 0]  # no third head was asked
    assert [seen.hits[0][1], seen.hits[1][0]] == [1, 1]


def test_acceptance_rates_shape_the_tree() -> None:
    texts = [torch.tensor([[1, 0, NEVER]] * 60)]
    chain, tree, probabilities = measure(texts, 3, 6)
    assert chain == 1
    assert tree == 3
    assert probabilities[0][1] > 0.8
    assert probabilities[1][0] > 0.8
    assert max(probabilities[2]) < 0.3
    HeadAccuracy(probabilities)  # what the drafter takes
    assert spread(texts, 0, (1, 5)) == [0.0, 1.0]
    assert spread([right := torch.zeros(2, 3, dtype=torch.long)], 2, (1,)) == [0.0]  # nothing is two tokens on
    assert spread([right], 1, (1,)) == [1.0]


def test_labels_survive_a_truncated_line(tmp_path: Path) -> None:
    TokenStore(tmp_path).add({"a": [1, 2]})
    TokenStore(tmp_path, 1).add({"b": [3]})
    with open(tmp_path / "0.jsonl", "a", encoding="utf-8") as file:
        file.write('["c", [4')
    again = TokenStore(tmp_path)
    assert again.tokens == {"a": [1, 2], "b": [3]}
    again.add({"c": [5]})
    assert TokenStore(tmp_path).tokens == {"a": [1, 2], "b": [3], "c": [5]}
    assert TokenStore(None).get("a") is None


def test_states_are_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    first = {"a": ([4, 5], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])), "b": ([], torch.zeros(0, 3))}
    HiddenStateStore(tmp_path, 3).add(first)
    HiddenStateStore(tmp_path, 3, rank=1).add({"c": ([6], torch.full((1, 3), 0.1))})
    with open(tmp_path / "0.f16", "ab") as file:  # cut off within a number, its name unwritten
        file.write(b"abc")
    again = HiddenStateStore(tmp_path, 3)
    assert set(again.names()) == {"a", "b", "c"}
    again.add({"d": ([7], torch.tensor([[7.0, 8.0, 9.0]]))})
    for store in (again, HiddenStateStore(tmp_path, 3)):
        assert store.get("a")[0] == [4, 5]
        torch.testing.assert_close(store.get("a")[1], first["a"][1])
        assert store.get("b")[1].shape == (0, 3)
        assert torch.equal(store.get("c")[1], torch.full((1, 3), 0.1).half().float())
        assert store.get("d")[1].tolist() == [[7, 8, 9]]
    (tmp_path / "0.f16").write_bytes((tmp_path / "0.f16").read_bytes()[:14])
    assert set(HiddenStateStore(tmp_path, 3).names()) == {"a", "b", "c"}


class Stopped(Exception):
    pass


@pytest.mark.parametrize("nodes", [0, 4, 7])
def test_labels_equal_generate(nodes: int) -> None:
    """Both modes in one batch, drafted or not; a prompt of text before moves nothing in the other rows."""
    model, sounds = whisper(seed=3), features(6)["input_features"]
    with torch.no_grad():
        states = model.model.encoder(sounds).last_hidden_state
    torch.manual_seed(0)
    made = MedusaHeads(MedusaConfig(32, model.config.vocab_size, heads=4))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    drafter = MedusaDrafter(made, model.proj_out) if nodes else None
    timed = [row % 2 == 1 for row in range(6)]
    head = [SOT, LANGUAGES["<|de|>"], TASKS["transcribe"]]
    prompts = [head if flag else [*head, NO_TIMESTAMPS] for flag in timed]
    result = decode_greedily(model, states, prompts, timed, 30, drafter, nodes)
    found_before = decode_greedily(
        model, states, [[PREVIOUS, 5, 6, *prompts[0]], *prompts[1:]], timed, 30, drafter, nodes
    )
    assert found_before[1:] == result[1:]
    assert found_before[0] != result[0]

    def first(model: Any, input_ids: Any, **options: Any) -> Any:
        raise Stopped(speculate(None)(model, input_ids, **options)[:, input_ids.shape[1] :].tolist())

    for flag in (False, True):
        rows = [row for row in range(6) if timed[row] == flag]
        with pytest.raises(Stopped) as stop:
            model.generate(sounds[rows], language="de", return_timestamps=flag, custom_generate=first)
        for row, text in zip(rows, stop.value.args[0], strict=True):
            assert result[row][:30] == text[: len(result[row])]
            assert len(result[row]) == 30 or result[row][-1] == 60


def test_different_models_have_different_fingerprints() -> None:
    one, other = whisper(seed=1), whisper(seed=1)
    assert decoding_fingerprint(one) == decoding_fingerprint(other)
    other.generation_config.suppress_tokens = [4]
    assert decoding_fingerprint(one) != decoding_fingerprint(other)
    assert decoding_fingerprint(one) != decoding_fingerprint(whisper(seed=2))


def test_features_are_whispers() -> None:
    samples = torch.randn(480_000, generator=torch.Generator().manual_seed(0)) * 0.1
    for mels in (80, 128):
        expected = WhisperFeatureExtractor(feature_size=mels)(samples.numpy(), sampling_rate=16000, return_tensors="pt")
        torch.testing.assert_close(whisper_mel(samples[None], mels), expected.input_features, rtol=1e-3, atol=1e-3)


def test_prompts_are_the_models_own() -> None:
    tokenizer = build_tokenizer(["two teas please"], 270)
    many = SimpleNamespace(
        is_multilingual=True,
        lang_to_id=LANGUAGES,
        task_to_id=TASKS,
        decoder_start_token_id=SOT,
        no_timestamps_token_id=NO_TIMESTAMPS,
        eos_token_id=60,
        prev_sot_token_id=PREVIOUS,
    )
    spelling = WindowTokenizer(tokenizer, many, "fr", "translate")
    names = spelling.get_added_vocab()
    assert (names["<|0.00|>"], names["<|startofprev|>"]) == (NO_TIMESTAMPS + 1, PREVIOUS)
    written = [PREVIOUS, 7, SOT, 1, 2, NO_TIMESTAMPS, 8, 9]
    head = [SOT, LANGUAGES["<|fr|>"], TASKS["translate"]]
    assert spelling.split(written) == ([PREVIOUS, 7, *head, NO_TIMESTAMPS], [8, 9, 60], False)
    assert spelling.split([SOT, 1, 2, 75, 8, 80]) == (head, [75, 8, 80, 60], True)
    assert WindowTokenizer(tokenizer, many, None, "transcribe").head[1] == LANGUAGE_PLACEHOLDER
    english = SimpleNamespace(decoder_start_token_id=SOT, no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=[60])
    assert WindowTokenizer(tokenizer, english, "en", "transcribe").split(written)[0] == [
        PREVIOUS,
        7,
        SOT,
        NO_TIMESTAMPS,
    ]
    with pytest.raises(InputError, match="`language`"):
        WindowTokenizer(tokenizer, many, "xx", "transcribe")
    with pytest.raises(InputError, match="`task`"):
        WindowTokenizer(tokenizer, many, "fr", "sing")
    with pytest.raises(InputError, match="`language`"):
        WindowTokenizer(tokenizer, english, "fr", "transcribe")


def test_a_new_block_is_the_decoders_last_layer() -> None:
    model = whisper()
    made = first_heads(model, "name", "block", 2, None)
    assert made.block is not None
    for name, value in model.model.decoder.layers[-1].state_dict().items():
        assert torch.equal(made.block.state_dict()[name], value)
    assert (made.config.mels, made.config.base) == (80, "name")


def test_a_copied_model_has_the_same_fingerprint() -> None:
    model = whisper()
    here, model.config._name_or_path = decoding_fingerprint(model), "elsewhere"
    assert decoding_fingerprint(model) == here
