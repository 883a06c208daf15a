"""Tests a model's native multi-token heads: they draft the same first tokens as in transformers' generation, and
change no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

import mmdec
from mmdec.errors import InputError
from mmdec.pretrained.mtp import MtpDrafter
from mmdec.types import Plan
from tests.support.draft_networks import paths, start_drafter
from tests.support.grid import slow_but
from tests.support.tiny_text import SIZES, language_model, prompts

EXPERTS: dict[str, Any] = {
    **SIZES,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 1,
    "initializer_range": 0.15,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, {"head_dim": 8}),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}


def with_head(kind: str, folder: Path) -> Any:
    """Return a tiny model, loaded from a folder that holds one native head with random weights."""
    config_class, network_class, sizes = KINDS[kind]
    torch.manual_seed(0)
    config_class(**{**EXPERTS, **sizes})
    network_class(config_class(**{**EXPERTS, **sizes})).save_pretrained(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    size = SIZES["hidden_size"]
    last = {name: value for name, value in state.items() if name.startswith("model.layers.1.")}
    head = {name.replace("layers.1.", "layers.2."): value.flip(-1).clone() for name, value in last.items()}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        head[f"model.layers.2.{name}.weight"] = torch.rand(size) + 0.5
    head["model.layers.2.eh_proj.weight"] = torch.randn(size, 2 * size) * 0.2
    save_file({**state, **head}, file, metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:  # the classes name the layers of the published sizes alone
        patch.setattr(network_class, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\..*"])
        model = network_class.from_pretrained(folder, attn_implementation="sdpa", experts_implementation="eager").eval()
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]
    return model


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return with_head(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.mark.parametrize("batch", slow_but([1, 4], [4]))
def test_texts_equal_plain_decoding(model: Any, batch: int) -> None:
    """Chains and trees, greedy and sampled, ragged rows."""
    inputs = prompts(batch)
    expected = model.generate(**inputs, max_new_tokens=14, do_sample=False)
    sampling: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "top_k": 20, "seed": 3}
    drawn = mmdec.generate(model, inputs, None, **sampling).sequences
    for nodes in (1, 3, (9, 3)):
        result = mmdec.generate(model, inputs, "mtp", num_speculative_tokens=nodes, max_new_tokens=14, do_sample=False)
        assert torch.equal(result.sequences, expected)
        assert torch.equal(
            mmdec.generate(model, inputs, "mtp", num_speculative_tokens=nodes, **sampling).sequences, drawn
        )
    result = mmdec.generate(model, inputs, "mtp", rule="residual", num_speculative_tokens=4, seed=1, max_new_tokens=8)
    assert result.lossless


def test_transformers_drafts_the_same_tokens(model: Any) -> None:
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    drafter, drafts = MtpDrafter.from_model(model), list[tuple[int, int]]()
    propose = drafter.propose

    def record_draft(state: Any, roots: Tensor, plan: Plan) -> Any:
        draft = propose(state, roots, plan)
        drafts.append((int(roots), int(draft.tokens[0, 1])))
        return draft

    drafter.propose = record_draft  # type: ignore[method-assign]
    prompt = prompts(1)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**prompt, **options)
    result = mmdec.generate(model, prompt, drafter, num_speculative_tokens=1, **options)
    seen, candidates = list[tuple[int, ...]](), MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *rest: Any, **named: Any) -> Any:
        out = candidates(self, input_ids, *rest, **named)
        if out[0].shape[1] > input_ids.shape[1]:
            seen.append(tuple(out[0][0, input_ids.shape[1] - 1 :].tolist()))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
        theirs = model.generate(**prompt, use_mtp=True, **options)
    assert torch.equal(result.sequences, expected)
    assert torch.equal(theirs, expected)
    assert len(drafts) > 5
    assert drafts == seen[: len(drafts)]


@torch.no_grad()
def test_the_cache_equals_one_pass_over_everything(model: Any) -> None:
    """Ragged rows: the first level's logits by the head over each row alone, from its first column."""
    drafter, rows, roots = MtpDrafter.from_model(model), [[5, 6, 7, 8, 9], [11, 12, 13], [20]], [7, 9, 4]
    memory = start_drafter(model, drafter, rows, roots)  # type: ignore[arg-type]
    draft = drafter.propose(memory, torch.tensor(roots), Plan(6, 2))  # type: ignore[arg-type]
    for row, text in enumerate(rows):
        ids = torch.tensor([text])
        features = model(ids, output_hidden_states=True).hidden_states[-1]
        single = drafter.start(_context(ids, features))
        single.queue = [(torch.tensor([[*text[1:], roots[row]]]), features, torch.ones(1, len(text), dtype=torch.bool))]
        hidden = drafter._take_in(single)
        assert paths(draft, row)[0][0] == int(drafter.logits(hidden).argmax())


def _context(ids: Tensor, features: Tensor) -> Any:
    from mmdec.types import Context

    positions = torch.arange(ids.shape[1])[None, None]
    return Context(ids, torch.ones_like(ids, dtype=torch.bool), positions, torch.tensor([1]), {-1: features})


def test_models_without_a_head_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names no native heads"):
        mmdec.generate(language_model(), prompts(1), "mtp", max_new_tokens=4)
    kind = next(kind for kind, (_, network, _) in KINDS.items() if isinstance(model, network))
    config_class, network_class, sizes = KINDS[kind]
    several = network_class(config_class(**{**EXPERTS, **sizes, "num_mtp_layers": 2}))
    with pytest.raises(InputError, match="native heads are 2"):
        mmdec.generate(several, prompts(1), "mtp", max_new_tokens=4)
    network_class(config_class(**{**EXPERTS, **sizes})).save_pretrained(tmp_path / "without")
    bare = network_class.from_pretrained(tmp_path / "without")
    with pytest.raises(InputError, match="could not be loaded"):
        mmdec.generate(bare, prompts(1), "mtp", max_new_tokens=4)
