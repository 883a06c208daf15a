"""Tests models with weights of few bits, with LoRA, and with layers on disk: drafts do not change the model's texts.

GPTQ's and AWQ's published formats are unpacked here; gptqmodel, bitsandbytes, PEFT and accelerate are tested if they
are installed.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import mmdec
from mmdec.errors import InputError
from mmdec.targets.quantization_check import sibling_difference
from mmdec.targets.registry import make_target
from tests.support.every_class import prompts
from tests.support.random_drafter import RandomDrafter

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
        expected = model.generate(**inputs, **OPTIONS)
        for drafter in ("lookup", "recycling", RandomDrafter(0.5, expected.tolist(), 0.8)):
            result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(9, 5), **OPTIONS)
            assert torch.equal(result.sequences, expected)
            assert drafted in (None, any(sum(round_.drafted) for round_ in result.rounds))


def packed(levels: Tensor, axis: int, kind: str) -> Tensor:
    """Pack whole numbers below 16, eight in an int32 along an axis."""
    eights = levels.long().unflatten(axis, (-1, 8)).movedim(axis + 1, -1)[..., list(ORDER[kind])]
    result = (eights << (4 * torch.arange(8))).sum(-1)
    return result.where(result < 2**31, result - 2**32).to(torch.int32)


class Packed(nn.Module):
    """Computes a linear layer with 4-bit weights, eight in an int32: GPTQ packs inputs, AWQ outputs."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, layer.bias
        weight = layer.weight.detach().T.reshape(-1, GROUP, layer.out_features)  # (groups, GROUP, out)
        low = weight.amin(1, keepdim=True).clamp(max=0.0)
        self.register_buffer("scales", ((weight.amax(1, keepdim=True) - low) / 15).half().float())
        self.register_buffer("zeros", (-low / self.scales).round().clamp(1, 15))
        levels = (weight / self.scales + self.zeros).round().clamp(0, 15).flatten(0, 1)
        self.register_buffer("qweight", packed(levels, 0 if kind == "gptq" else 1, kind))

    def forward(self, states: Tensor) -> Tensor:
        eights = (self.qweight[..., None].long() >> (4 * torch.arange(8))) & 15
        eights = eights[..., torch.tensor(ORDER[self.kind]).argsort()]
        levels = eights.movedim(-1, 1).flatten(0, 1) if self.kind == "gptq" else eights.flatten(1)
        weight = (levels.reshape(-1, GROUP, levels.shape[1]) - self.zeros) * self.scales
        return nn.functional.linear(states, weight.flatten(0, 1).T, self.bias)

    def published(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; GPTQ's zeros are one less."""
        gptq, inputs = self.kind == "gptq", len(self.scales) * GROUP
        zeros = packed(self.zeros[:, 0] - int(gptq), 1, self.kind)
        groups = {"g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP} if gptq else {}
        return {"qweight": self.qweight, "qzeros": zeros, "scales": self.scales[:, 0].half(), **groups}


def pack(model: Any, kind: str) -> dict[str, Tensor]:
    """Pack a model's linear layers in place. Returns the tensors of its checkpoint."""
    tensors = dict[str, Tensor](model.state_dict())
    for path, part in list(model.model.named_modules(prefix="model")):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, layer := Packed(child, kind))
                del tensors[f"{path}.{name}.weight"]
                tensors |= {f"{path}.{name}.{key}": value for key, value in layer.published().items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ORDER)
def test_gptq_and_awq_layers_keep_their_texts(kind: str) -> None:
    model = llama()
    plain, states = copy.deepcopy(model), torch.randn(3, 64)
    pack(model, kind)
    near = model.model.layers[0].self_attn.q_proj(states) - plain.model.layers[0].self_attn.q_proj(states)
    assert 1e-3 < float(near.abs().max()) < 0.6  # four bits
    assert sibling_difference(model, make_target(model))[0] < 1e-5
    check(model, True)


@pytest.mark.parametrize("kind", ORDER)
def test_checkpoints_of_gptq_and_awq_keep_their_texts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are loaded as users do it: by transformers, with the layers of gptqmodel."""
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    pytest.importorskip("optimum", reason="optimum is not installed")
    model, states = llama(), torch.randn(3, 64)
    model.save_pretrained(tmp_path)
    save_file(pack(model, kind), tmp_path / "model.safetensors", {"format": "pt"})
    own = {"desc_act": False, "sym": False, "checkpoint_format": "gptq", "backend": "gptq_torch"}
    way = own if kind == "gptq" else {"zero_point": True, "version": "gemm", "backend": "torch_awq"}
    settings = json.loads((tmp_path / "config.json").read_text("utf-8"))
    settings["quantization_config"] = {"bits": 4, "group_size": GROUP, "quant_method": kind, **way}
    (tmp_path / "config.json").write_text(json.dumps(settings), "utf-8")
    monkeypatch.setattr(torch, "compile", lambda model=None, **_: model)  # gptqmodel's layers take minutes of it
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="cpu").eval()
    layer = loaded.model.layers[0].self_attn.q_proj
    assert type(layer).__module__.startswith("gptqmodel.")
    ours = model.model.layers[0].self_attn.q_proj(states)
    torch.testing.assert_close(layer(states), ours, rtol=0.0, atol=5e-3)  # gptqmodel rounds weights to float16
    check(loaded, True)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 in floats", "fp4 in floats", "int8", "int8 with outliers"])
def test_bitsandbytes_layers_keep_their_texts(kind: str, tmp_path: Path) -> None:
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


def test_lora_adapters_keep_their_texts() -> None:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, reason=f"peft {MIN_PEFT_VERSION} is not installed")
    model = llama()
    model.add_adapter(peft.LoraConfig(**LORA))
    adapted(model)
    check(model, True)


def test_a_peft_model_keeps_its_texts() -> None:
    """It uses drafts in its own `generate`, and its base model in every call: with adapters, merged, and without."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(llama(), peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))
    adapted(model)
    inputs, base, drafted = prompts("x", (21, 9, 4)), model.get_base_model(), list[int]()
    plug = mmdec.speculate(
        "lookup", num_speculative_tokens=5, on_round=lambda round_: drafted.append(sum(round_.drafted))
    )
    expected = model.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS, custom_generate=plug), expected)
    assert any(drafted)
    check(base, True)
    with model.disable_adapter():
        check(base, True)
    model.merge_adapter()
    check(base, True)
    with pytest.raises(InputError, match=r"of a PeftModel give `get_base_model\(\)`"):
        mmdec.generate(model, inputs, **OPTIONS)


def test_a_device_map_keeps_its_texts(tmp_path: Path) -> None:
    """One layer lies on disk between its passes."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    llama().save_pretrained(tmp_path)
    parts = ("embed_tokens", "layers.0", "norm", "rotary_emb")
    places = {**{f"model.{part}": "cpu" for part in parts}, "model.layers.1": "disk", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "disk", dtype=torch.float32
    ).eval()
    assert any(weight.device.type == "meta" for weight in model.parameters())
    check(model, True)
