"""Tests `mmdec.register`, which adds "mmdec_tree" to transformers, and that `import mmdec` does not import torch."""

import subprocess
import sys

import pytest

USE = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2))
model.set_attn_implementation("mmdec_tree")
assert model.config._attn_implementation == "mmdec_tree"
import torch
assert model(torch.ones(2, 3, dtype=torch.long)).logits.shape == (2, 3, 8)
"""
LIGHT = "import sys, mmdec\nassert not {'torch', 'transformers'} & set(sys.modules)\n"


@pytest.mark.parametrize(
    "before",
    [LIGHT + "mmdec.register()\n", "from transformers import PreTrainedModel\nimport mmdec\nmmdec.generate\n"],
    ids=["called", "by the first use of generate"],
)
def test_the_implementation_is_known(before: str) -> None:
    done = subprocess.run([sys.executable, "-c", before + USE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
