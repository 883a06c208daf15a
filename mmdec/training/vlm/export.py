"""Exports a training run to a folder that `LlavaForConditionalGeneration.from_pretrained` reads.

python -m mmdec.training.vlm.export --run runs/vlm --out models/vlm-scenes
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
)

from mmdec.hub.publish import CARD, whole_folder, write_provenance
from mmdec.nn.fingerprint import fingerprint
from mmdec.training.checkpoints import load_averaged, newest
from mmdec.training.vlm.module import VlmModule
from mmdec.training.vlm.network import Shape
from mmdec.training.vlm.tokens import IMAGE, TEMPLATE
from mmdec.types import InputError, told


def load_module(checkpoints: Sequence[Path]) -> tuple[VlmModule, int]:
    """Load the training module with the average of several checkpoints' weights.

    Returns: the module, and the number of training steps of the last checkpoint.
    """
    plain = {"start": None, "compiled": False}
    return load_averaged(
        lambda options: VlmModule(**{**options, "shape": Shape(**options["shape"]), **plain}), checkpoints
    )


@torch.no_grad()
def mix(model: LlavaForConditionalGeneration, other: Path, share: float) -> LlavaForConditionalGeneration:
    """Replace the model's weights by the weighted average of its weights and those of another model.

    other: the other model's folder. share: weight of `model` in the average, 0 to 1; the other model's is 1 - share.
    Returns: the other model, unchanged.
    """
    earlier = type(model).from_pretrained(other, dtype=torch.float32)
    weights = earlier.state_dict()
    own = model.state_dict()
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in weights.items()}:
        raise InputError(f"`mean_with` must have the run's sizes, but the model of '{other}' has others.")
    means = {name: weights[name].lerp(value.float(), share) for name, value in own.items()}
    model.load_state_dict(means)
    return earlier


def build_processor(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> LlavaProcessor:
    """Build the model's processor. It resizes pictures to the model's square, scales values to -1 ... 1, and has the
    chat template."""
    return LlavaProcessor(
        image_processor=SiglipImageProcessor(size={"height": shape.image, "width": shape.image}),
        tokenizer=tokenizer,
        patch_size=shape.patch,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE,
        chat_template=TEMPLATE,
    )


def export(
    checkpoints: Sequence[Path], tokenizer_folder: Path, out: Path, mean_with: Path | None = None, share: float = 0.5
) -> Path:
    """Write the trained model's folder, in half precision. If writing fails, an existing folder stays as it was. An
    existing model card is kept.

    checkpoints: training checkpoints; their weights are averaged. tokenizer_folder: the folder of the model's
        tokenizer. out: the folder to write.
    mean_with: folder of the model from which the training began; the exported weights are the average of its weights
        and the trained ones (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").
    share: weight of the trained model in this average, 0 to 1.
    """
    if not 0 <= share <= 1:
        raise InputError(f"`share` must be from 0 to 1, but is {share}.")
    module, step = load_module(checkpoints)
    blend: dict[str, object] = {}
    if mean_with is not None:
        blend = {"mean_with": fingerprint(mix(module.model, mean_with, share)), "share": share}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    model = module.model.half()
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with whole_folder(out) as fresh:
        model.save_pretrained(fresh)
        build_processor(tokenizer, module.shape).save_pretrained(fresh)
        parameters = {name: value for name, value in module.hparams.items() if name != "units"}
        training = {"checkpoints": len(checkpoints), "step": step, "hyperparameters": parameters, **blend}
        write_provenance(fresh, training, model.device)
        if (out / CARD).is_file():
            shutil.copy(out / CARD, fresh)
    return out


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/vlm"))
    parser.add_argument("--average", type=int, default=1, help="checkpoints to average, the last ones")
    parser.add_argument("--out", type=Path, default=Path("models/vlm-scenes"))
    parser.add_argument("--mean-with", type=Path, help="write the mean with this exported model's weights")
    parser.add_argument("--share", type=float, default=0.5, help="of the run's weights in that mean (default 0.5)")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    checkpoints = newest(options.run / "checkpoints", options.average)
    print(export(checkpoints, options.run / "tokenizer", options.out, options.mean_with, options.share))


if __name__ == "__main__":
    with told():
        main()
