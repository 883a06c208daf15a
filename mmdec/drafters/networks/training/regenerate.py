"""Lets a target answer the questions of a corpus, as training data of drafters. Training does the same when it begins.

python -m mmdec.drafters.networks.training.regenerate --config recipes/vlm_drafters/scenes/eagle.yaml
    [--base FOLDER] [--corpus FOLDER] [--part 0 --parts 8] [--device cuda:0] [--features] [--allow-absolute]

Answers are greedy and stored at once in the recipe's `cache_dir`: an interrupted run can continue. Eight processes
with eight parts can use eight GPUs. With --features, the target's features of the answers are also computed and
stored. This takes 2 bytes for each token, layer and channel, so it suits small targets only.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from mmdec.drafters.networks.training.data import DraftData, Ramp
from mmdec.drafters.networks.training.module import DraftModule
from mmdec.errors import InputError, exit_on_error


def draft_data(recipe: dict[str, Any], **changes: Any) -> DraftData:
    """Make the data module of a training recipe.

    Args:
        changes: Options that replace those of the recipe.
    """
    options = {**recipe["data"]["init_args"], **changes}
    if options.get("ramp") is not None:
        options["ramp"] = Ramp(**options["ramp"])
    return import_class(recipe["data"]["class_path"])(**options)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a drafter's recipe")
    for name in ("base", "corpus", "cache_dir"):
        parser.add_argument(f"--{name.replace('_', '-')}", help="replaces the recipe's value")
    parser.add_argument("--part", type=int, default=0, help="which part of the questions, from 0")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--device", help="cpu, or cuda:0")
    parser.add_argument("--features", action="store_true", help="keep the target's features, too")
    parser.add_argument("--allow-absolute", action="store_true", help="as the recipe's option of that name")
    options = parser.parse_args()
    if not 0 <= options.part < options.parts:
        raise InputError(
            f"`part` must be from 0 to {options.parts - 1}, but is {options.part}. Number the parts from 0."
        )
    changes = {name: value for name in ("base", "corpus", "cache_dir") if (value := getattr(options, name)) is not None}
    changes |= {"allow_absolute_paths": True} if options.allow_absolute else {}
    recipe = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    data = draft_data(recipe, **changes)
    fresh = data.regenerate(options.part, options.parts, options.device)
    print(f"{fresh} answers are new, in {data.cache_dir}")
    if options.features:
        chosen = recipe["model"]
        module: DraftModule = import_class(chosen["class_path"])(**chosen["init_args"])
        needs = module.training_needs(module.draft_config(data.teacher))
        fresh = data.keep_features(needs, module.options.half_teacher, options.part, options.parts)
        print(f"{fresh} readings are new")


def import_class(path: str) -> Any:
    """Import a class.

    Args:
        path: "package.module.Class".
    """
    package, _, name = path.rpartition(".")
    return getattr(import_module(package), name)


if __name__ == "__main__":
    with exit_on_error():
        main()
