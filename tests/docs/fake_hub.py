"""A hub cache for the code on a documentation page: each id in it leads to a tiny random model of bytes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel, Qwen2Tokenizer

from tests.support.draft_networks import draft_network
from tests.support.tiny_text import language_model

REVISION = "0" * 40
MODELS = Path(__file__).parents[2] / "models"
SHIPPED = {"openai/whisper-small": "whisper-tiny.en", "llava-hf/llava-1.5-7b-hf": "vlm-scenes"}  # by Hugging Face id
END = "<|endoftext|>"


def write_cache(folder: Path, code: str) -> Path:
    """Write the folder for HF_HUB_CACHE. code: the page's code, whose Hugging Face ids the cache gets."""
    for name, shipped in SHIPPED.items():
        if f'"{name}"' in code:
            repository = _repository(folder, name)
            shutil.copytree(MODELS / shipped, repository / "snapshots" / REVISION)
    vocabulary = {letter: number for number, letter in enumerate([END, *sorted(ByteLevel.alphabet())])}
    model = language_model("qwen2", vocab_size=len(vocabulary), bos_token_id=None, eos_token_id=0)
    # for pages on diffusion models: the letter of byte 255, which no text has
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], mask_token="ÿ")
    for name in sorted(set(re.findall(r'from_pretrained\("([\w-]+/[\w.-]+)"', code))):
        repository = _repository(folder, name)
        model.save_pretrained(repository / "snapshots" / REVISION)
        tokenizer.save_pretrained(repository / "snapshots" / REVISION)
    for name in sorted(set(re.findall(r'load_drafter\("([\w-]+/[\w.-]+)"', code))):
        if not (MODELS / name).is_dir():  # else a shipped one
            _write_eagle3(_repository(folder, name) / "snapshots" / REVISION, model)
    return folder


def _write_eagle3(folder: Path, model: PreTrainedModel) -> None:
    """Write an EAGLE-3 network for the model, in a published layout."""
    network = draft_network("eagle3", model)
    config = network.config
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size")
    sizes = {name: getattr(config, name) for name in (*names, "rope_theta")}
    folder.mkdir(parents=True)
    settings = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    state = {name.replace("layers.0.", "midlayer."): value for name, value in network.state_dict().items()}
    save_file(state, folder / "model.safetensors")


def _repository(folder: Path, name: str) -> Path:
    """Make a model's folder in the cache, with one revision."""
    repository = folder / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
    return repository
