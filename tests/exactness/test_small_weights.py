"""Weights in few bits as people have them, and LoRA: drafted texts are the same model's own.

GPTQ's and AWQ's layers are unpacked here as they are published; bitsandbytes and PEFT are tried where installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import mmdec
from mmdec.targets.registry import target_of
from mmdec.targets.siblings import difference
from mmdec.types import InputError
from tests.support.every_class import prompts
from tests.support.wild import Wild

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, and the one about quantised activations
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
GROUP = 32  # inputs that share a scale
ORDER = {"gptq": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}  # which of 8 numbers each 4 bits hold


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 48}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.2)).eval()


def check(model: Any, drafted: bool | None) -> None:
    """Texts with drafts are the model's own; there are drafts or not; None: either."""
    for lengths in ((21,), (21, 9, 4)):
        inputs = prompts("x", lengths)
        wanted = model.generate(**inputs, **OPTIONS)
        for drafter in ("lookup", "recycling", Wild(0.5, wanted.tolist(), 0.8)):
            found = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(9, 5), **OPTIONS)
            assert torch.equal(found.sequences, wanted)
            assert drafted in (None, any(sum(round_.drafted) for round_ in found.rounds))


class Packed(nn.Module):
    """A linear layer with 4-bit weights, eight in an int32: GPTQ packs inputs, AWQ outputs."""

    zeros: Tensor

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, layer.bias
        weight = layer.weight.detach().T.reshape(-1, GROUP, layer.out_features)  # (groups, GROUP, out)
        low = weight.amin(1, keepdim=True)
        self.scales = nn.Parameter((weight.amax(1, keepdim=True) - low) / 15, requires_grad=False)
        self.register_buffer("zeros", (-low / self.scales).round())
        levels = (weight / self.scales + self.zeros).round().clamp(0, 15).to(torch.int64)
        whole = levels.flatten(0, 1)
        eights = whole.unflatten(0, (-1, 8)).movedim(1, -1) if kind == "gptq" else whole.unflatten(1, (-1, 8))
        shifts = 4 * torch.arange(8)
        packed = (eights[..., list(ORDER[kind])] << shifts).sum(-1)
        self.register_buffer("qweight", packed.where(packed < 2**31, packed - 2**32).to(torch.int32))

    def forward(self, states: Tensor) -> Tensor:
        packed: Any = self.qweight
        eights = (packed[..., None] >> (4 * torch.arange(8))) & 15
        eights = eights[..., torch.tensor(ORDER[self.kind]).argsort()]
        levels = eights.movedim(-1, 1).flatten(0, 1) if self.kind == "gptq" else eights.flatten(1)
        weight = (levels.reshape(-1, GROUP, levels.shape[1]) - self.zeros) * self.scales
        return nn.functional.linear(states, weight.flatten(0, 1).T, self.bias)


@pytest.mark.parametrize("kind", ORDER)
def test_gptq_and_awq(kind: str) -> None:
    model = llama()
    plain, states = copy.deepcopy(model), torch.randn(3, 64)
    for part in list(model.model.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, Packed(child, kind))
    near = model.model.layers[0].self_attn.q_proj(states) - plain.model.layers[0].self_attn.q_proj(states)
    assert 1e-3 < float(near.abs().max()) < 0.6  # four bits
    assert difference(model, target_of(model))[0] < 1e-5
    check(model, True)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 in floats", "fp4 in floats", "int8", "int8 with outliers"])
def test_bitsandbytes(kind: str, tmp_path: Path) -> None:
    """LLM.int8's outliers are chosen from a whole pass, so that a token's neighbours change its scores.

    A processor with AVX-512 and bfloat16 rounds what enters a 4-bit layer, unless the layer is in training.
    """
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import BitsAndBytesConfig

    if kind.startswith("int8"):
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=1.0 if "outliers" in kind else 0.0)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind[:3], bnb_4bit_compute_dtype=torch.float32
        )
    llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32, device_map="cpu"
    ).eval()
    assert not model.model.layers[0].self_attn.q_proj.weight.is_floating_point()
    if "floats" in kind:
        for part in model.model.modules():
            part.training = type(part).__name__ == "Linear4bit"
    check(model, None if kind in ("nf4", "fp4") else "outliers" not in kind)


LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def adapted(model: Any) -> None:
    """Give a model's adapters weights that change its text."""
    plain = model.generate(**prompts("x", (21,)), **OPTIONS)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, 0.0, 0.3)
    model.eval()
    assert not torch.equal(model.generate(**prompts("x", (21,)), **OPTIONS), plain)


def test_lora() -> None:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, reason=f"peft {MIN_PEFT_VERSION} is not installed")
    model = llama()
    model.add_adapter(peft.LoraConfig(**LORA))
    adapted(model)
    check(model, True)


def test_a_peft_model() -> None:
    """It drafts by its own `generate`, and its base model by every call: with adapters, merged, and without."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(llama(), peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))
    adapted(model)
    inputs, base, drafted = prompts("x", (21, 9, 4)), model.get_base_model(), list[int]()
    plug = mmdec.speculate("lookup", num_speculative_tokens=5, on_round=lambda one: drafted.append(sum(one.drafted)))
    wanted = model.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS, custom_generate=plug), wanted)
    assert any(drafted)
    check(base, True)
    with model.disable_adapter():
        check(base, True)
    model.merge_adapter()
    check(base, True)
    with pytest.raises(InputError, match=r"of a PeftModel give `get_base_model\(\)`"):
        mmdec.generate(model, inputs, **OPTIONS)
