"""`import mmdec` alone makes "mmdec_tree" an attention implementation, and loads neither torch nor transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

from mmdec.drafters import registry
from mmdec.generation.registration import register_when_there

USE = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2))
model.set_attn_implementation("mmdec_tree")
assert model.config._attn_implementation == "mmdec_tree"
import inspect, transformers.modeling_utils
assert "class PreTrainedModel" in inspect.getsource(transformers.modeling_utils)
import torch
assert model(torch.ones(2, 3, dtype=torch.long)).logits.shape == (2, 3, 8)
"""
FIRST = "import sys, mmdec\nassert not {'torch', 'transformers'} & set(sys.modules)\n"


@pytest.mark.parametrize(
    "before",
    [FIRST, "import transformers\nimport mmdec\n", "from transformers import PreTrainedModel\nimport mmdec\n"],
    ids=["mmdec first", "transformers first", "models first"],
)
def test_the_implementation_is_known(before: str) -> None:
    done = subprocess.run([sys.executable, "-c", before + USE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


FOUND = """
import sys, mmdec
assert "mmdec.hub.find" not in sys.modules
speculation = mmdec.speculate("vlm-scenes/eagle")
assert "mmdec.hub.find" in sys.modules
try:
    mmdec.speculate("no such/thing")
except mmdec.InputError as error:
    print(error)
"""


def test_generation_finds_drafters_by_id_though_it_knows_no_hub() -> None:
    done = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("`drafter` must be a drafter's folder, a shipped model's name")


def test_folders_are_looked_for_by_all_who_offer_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_finders", [])
    assert registry.find_folder("a/b", "drafter") is None
    registry.add_finder(lambda given, argument: None)
    registry.add_finder(lambda given, argument: tmp_path if given == "a/b" else None)
    assert registry.find_folder("a/b", "drafter") == tmp_path
    assert registry.find_folder("b/a", "drafter") is None


@pytest.mark.parametrize(
    "line",
    ["from mmdec.hub import no_such_name", "import mmdec.hub.no_such_module", "from torch import no_such_name"],
)
def test_a_broken_module_of_ours_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    (tmp_path / "registers_broken.py").write_text(line, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="no_such"):
        register_when_there({"sys": "registers_broken"})


def test_an_optional_package_may_be_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "registers_optional.py").write_text("import no_such_package.part", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    register_when_there({"sys": "registers_optional"})


def test_drafters_of_the_hub_do_not_vanish_without_a_word() -> None:
    broken = "import sys, mmdec.hub\nsys.modules['mmdec.hub.find'] = None\nmmdec.speculate('vlm-scenes/eagle')"
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, timeout=300)
    assert "import of mmdec.hub.find halted" in done.stderr
    assert "InputError" not in done.stderr
