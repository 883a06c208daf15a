"""Tests that "mmdec_tree" is known to transformers after `mmdec.register_attention`, or once `generate` was used."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
import mmdec

def check(before):
    before()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2))
    model.set_attn_implementation("mmdec_tree")
    assert model.config._attn_implementation == "mmdec_tree"
    assert model(torch.ones(2, 3, dtype=torch.long)).logits.shape == (2, 3, 8)

assert "mmdec_tree" not in AttentionInterface()
for before in (lambda: mmdec.register_attention(), lambda: mmdec.generate):
    if (child := os.fork()) == 0:
        check(before)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_the_implementation_is_registered_by_a_call_and_by_generate() -> None:
    """Each in a fork of a new process, where nothing has registered it."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
