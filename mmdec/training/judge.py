"""Which of two models is better: errors of both decoders on the development split, as validation counts them."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from mmdec import hub
from mmdec.training.corpus import SpeechTranslationData
from mmdec.training.export import load_module
from mmdec.training.speech import DASpeechModule


def phone_errors(model: Path, data: dict[str, Any]) -> float:
    """Mean phone error rate of the graph and the baseline; `model` is a model's directory or a checkpoint.

    `data` are the options of `SpeechTranslationData`: the rows, and how they are cut, are those of the recipe.
    """
    if model.is_dir():
        translator = hub.load(model, "cpu")
        module = DASpeechModule(list(translator.units), size="small")
        module.network = translator.model
        module.config = translator.model.config
    else:
        module, _ = load_module([model])
    corpus = SpeechTranslationData(**{**data, "acoustic": False})
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers
        scores = trainer.validate(module, corpus, verbose=False)[0]
    return (scores["dev/dag_per"] + scores["dev/ar_per"]) / 2
