import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, MambaForCausalLM

import mmdec
from mmdec import cli, compat
from mmdec.compat import CACHE_ARGUMENT, FIRST_UNSUPPORTED_TRANSFORMERS, MIN_TRANSFORMERS
from mmdec.errors import MmdecError
from tests.support.tiny_text import language_model

ROOT = Path(__file__).parents[2]


def test_the_range_is_that_of_the_package() -> None:
    oldest, refused = (".".join(map(str, numbers)) for numbers in (MIN_TRANSFORMERS, FIRST_UNSUPPORTED_TRANSFORMERS))
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"transformers>={oldest},<{refused}" in given


@pytest.mark.parametrize("release", ["5.22.1", "5.25.0.dev0", "4.57.6", "6.0.0"])
def test_another_version_is_refused_in_one_sentence(release: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(compat, "version", lambda name: release)
    compat.transformers_release.cache_clear()
    try:
        with pytest.raises(MmdecError, match=f"`transformers` must be at least .* but is {release}. Run `pip install"):
            mmdec.generate  # noqa: B018
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    finally:
        compat.transformers_release.cache_clear()


def test_the_cache_has_the_models_own_name() -> None:
    assert CACHE_ARGUMENT in inspect.signature(LlamaForCausalLM.forward).parameters
    assert {CACHE_ARGUMENT, "cache_params"} & inspect.signature(MambaForCausalLM.forward).parameters.keys()
    assert CACHE_ARGUMENT in language_model()(language_model().dummy_inputs["input_ids"][:1], use_cache=True)
