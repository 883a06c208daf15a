"""From a training run to the small model's folder: what `LlavaForConditionalGeneration.from_pretrained` reads.

python -m mmdec.training.vlm.export --run runs/vlm --out models/vlm-scenes
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, LlavaProcessor, PreTrainedTokenizerFast, SiglipImageProcessor

from mmdec.hub.publish import CARD, whole_folder, write_provenance
from mmdec.training.daspeech.export import average, newest, read_checkpoint
from mmdec.training.vlm.module import VlmModule
from mmdec.training.vlm.network import Shape
from mmdec.training.vlm.tokens import IMAGE, TEMPLATE


def load_module(checkpoints: Sequence[Path]) -> tuple[VlmModule, int]:
    """The training module with the averaged weights of its checkpoints, and the last one's step."""
    last = read_checkpoint(checkpoints[-1])
    options = {name: value for name, value in last["hyper_parameters"].items() if not name.startswith("_")}
    options["shape"] = Shape(**options["shape"])
    module = VlmModule(**{**options, "start": None, "compiled": False})
    module.load_state_dict(average(read_checkpoint(path)["state_dict"] for path in checkpoints))
    return module.eval(), int(last["global_step"])


def build_processor(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> LlavaProcessor:
    """Pictures of any size are scaled to the model's square, values -1 to 1; the text is a chat."""
    return LlavaProcessor(
        image_processor=SiglipImageProcessor(size={"height": shape.image, "width": shape.image}),
        tokenizer=tokenizer,
        patch_size=shape.patch,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE,
        chat_template=TEMPLATE,
    )


def export(checkpoints: Sequence[Path], tokenizer_folder: Path, out: Path) -> Path:
    """Write the model's folder in half precision and in one step: on an error the old one stays.

    An earlier card is kept.
    """
    module, step = load_module(checkpoints)
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
        training = {"checkpoints": len(checkpoints), "step": step, "hyperparameters": parameters}
        write_provenance(fresh, training, model.device)
        if (out / CARD).is_file():
            shutil.copy(out / CARD, fresh)
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/vlm"))
    parser.add_argument("--average", type=int, default=1, help="checkpoints to average, the last ones")
    parser.add_argument("--out", type=Path, default=Path("models/vlm-scenes"))
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    print(export(newest(options.run / "checkpoints", options.average), options.run / "tokenizer", options.out))


if __name__ == "__main__":
    main()
