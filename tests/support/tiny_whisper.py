"""Tiny Whispers with random weights, and with special and timestamp tokens in Whisper's order.

`whisper` builds a model with the vocabulary below and no tokenizer, `network` one with a tokenizer's vocabulary.
`write` saves such a model with its processor and Medusa heads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from mmdec.drafters.medusa.checkpoint import save_heads
from mmdec.drafters.medusa.network import MedusaConfig, MedusaHeads

FRAMES = 100  # feature frames in a second
STEPS = FRAMES // 2  # encoder states in a second, each of 0.02 s
TEXT = 60  # number of text tokens, which are the first ids
EOT, SOT = 60, 61
LANGUAGES = {"<|en|>": 62, "<|de|>": 63, "<|fr|>": 64}
TASKS = {"translate": 65, "transcribe": 66}
PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = 68, 69, 70
TIMESTAMPS = 71  # id of the timestamp 0.00; 0.02, ... 1.00 follow
VOCABULARY = TIMESTAMPS + STEPS + 1
SENTENCES = [
    "Hello there, how are you today?",
    "The train leaves at seven in the evening.",
    "Where is the station?",
] * 3
SIZES: dict[str, Any] = {
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 48,
    "max_source_positions": STEPS,  # a window of one second
    "max_target_positions": 64,
    "init_std": 0.4,  # large: texts repeat themselves now and then, and end at different lengths
}


END, START = "<|endoftext|>", "<|startoftranscript|>"
NAMED_TASKS = {"translate": "<|translate|>", "transcribe": "<|transcribe|>"}
OTHERS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
PRECISION = 0.02  # seconds between two successive timestamp tokens
WINDOW_SECONDS = 30


def build_tokenizer(texts: Iterable[str], pieces: int) -> WhisperTokenizer:
    """Build an English tokenizer in Whisper's format: byte-level BPE learned from `texts`, then Whisper's special
    tokens in their order, then the timestamps of a 30 s window (Radford et al. 2022, section 2.3).
    pieces: vocabulary size of the BPE, the 256 bytes included."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(
        (f" {text}" for text in texts), vocab_size=max(pieces, 256), min_frequency=2, show_progress=False
    )
    with tempfile.TemporaryDirectory() as folder:
        learner.save_model(folder)
        vocab = json.loads((Path(folder) / "vocab.json").read_text(encoding="utf-8"))
        lines = (Path(folder) / "merges.txt").read_text(encoding="utf-8").splitlines()
        # an empty normaliser, because Whisper's own would convert British spellings
        (Path(folder) / "normalizer.json").write_text("{}", encoding="utf-8")
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        tokenizer = WhisperTokenizer(
            vocab=vocab, merges=merges, normalizer_file=str(Path(folder) / "normalizer.json"), pad_token=END
        )
    special = [START, "<|en|>", *NAMED_TASKS.values(), *OTHERS]
    tokenizer.add_special_tokens({"additional_special_tokens": special})  # type: ignore[arg-type] # a list is taken
    stamps = round(WINDOW_SECONDS / PRECISION) + 1
    tokenizer.add_tokens([f"<|{step * PRECISION:.2f}|>" for step in range(stamps)])
    tokenizer.set_prefix_tokens(language="english", task="transcribe")
    return tokenizer


def generation_config(tokenizer: WhisperTokenizer, positions: int) -> GenerationConfig:
    """Return a Whisper's generation settings for this tokenizer. positions: the decoder's number of positions."""
    number: Any = tokenizer.convert_tokens_to_ids
    end, start = number(END), number(START)
    special = [number(name) for name in (START, "<|en|>", *NAMED_TASKS.values(), *OTHERS[:3])]
    return GenerationConfig(
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        max_length=positions,
        begin_suppress_tokens=[number("Ġ"), end],
        suppress_tokens=special,
        is_multilingual=True,
        lang_to_id={"<|en|>": number("<|en|>")},
        task_to_id={task: number(name) for task, name in NAMED_TASKS.items()},
        no_timestamps_token_id=number("<|notimestamps|>"),
        prev_sot_token_id=number("<|startofprev|>"),
        max_initial_timestamp_index=50,
        return_timestamps=False,
    )


def build(vocabulary: int, start: int, end: int, seed: int, **sizes: Any) -> WhisperForConditionalGeneration:
    """Build a model with random weights. start, end: the tokens that a text begins and ends with."""
    torch.manual_seed(seed)
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    return WhisperForConditionalGeneration(WhisperConfig(**{"vocab_size": vocabulary, **special, **SIZES, **sizes}))


def configure(model: WhisperForConditionalGeneration, **settings: Any) -> WhisperForConditionalGeneration:
    """Add generation settings to the model's, and return it in evaluation mode."""
    common = {"max_initial_timestamp_index": 20, "alignment_heads": [[0, 1], [1, 0]]}
    for name, value in {**common, **settings}.items():
        setattr(model.generation_config, name, value)
    return model.eval()


def whisper(mels: int = 80, seed: int = 0, **sizes: Any) -> WhisperForConditionalGeneration:
    """Build a multilingual model with the vocabulary of this file."""
    return configure(
        build(VOCABULARY, SOT, EOT, seed, num_mel_bins=mels, **sizes),
        is_multilingual=True,
        lang_to_id=LANGUAGES,
        task_to_id=TASKS,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        begin_suppress_tokens=[3, EOT],
        suppress_tokens=[1, 2, *range(SOT, NO_TIMESTAMPS)],
        max_length=48,
    )


def processor(seconds: int = 1, mels: int = 80) -> WhisperProcessor:
    """Build a processor: features of windows of `seconds`, and a tokenizer of 320 tokens, timestamps not counted."""
    extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    return WhisperProcessor(extractor, build_tokenizer(SENTENCES, 320))


def network(tokenizer: Any, seed: int = 3, seconds: int = 1, **sizes: Any) -> WhisperForConditionalGeneration:
    """Build a model with a tokenizer's vocabulary, for windows of `seconds`."""
    number, steps = tokenizer.convert_tokens_to_ids, STEPS * seconds
    end, start, first = number("<|endoftext|>"), number("<|startoftranscript|>"), number("<|notimestamps|>") + 1
    model = build(len(tokenizer), start, end, seed, **{"max_source_positions": steps, **sizes})
    model.generation_config = generation_config(tokenizer, 12)
    return configure(
        model,
        lang_to_id={"<|en|>": number("<|en|>"), "<|de|>": number("<|startoflm|>")},
        suppress_tokens=[*range(end + 1, first - 1), *range(first + steps + 1, len(tokenizer))],
    )


def medusa_heads(config: MedusaConfig, seed: int = 0, std: float = 0.2) -> MedusaHeads:
    """Build Medusa heads with random weights."""
    torch.manual_seed(seed)
    heads = MedusaHeads(config)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=std)
    return heads.eval()


def heads(model: WhisperForConditionalGeneration, seed: int = 0) -> MedusaHeads:
    """Build three linear Medusa heads for a model."""
    return medusa_heads(MedusaConfig(model.config.d_model, model.config.vocab_size, heads=3), seed)


def write(directory: Path, with_heads: bool = True, seconds: int = 1, seed: int = 3, **sizes: Any) -> Path:
    """Write a folder that `load_whisper` can load."""
    whole = processor(seconds, sizes.get("num_mel_bins", 80))
    model = network(whole.tokenizer, seed, seconds, **sizes)  # type: ignore[attr-defined]  # set by ProcessorMixin
    model.half().save_pretrained(directory)
    whole.save_pretrained(directory)
    if with_heads:
        save_heads(directory / "medusa", heads(model))
    return directory


def sound(batch: int, windows: float = 1.0, mels: int = 80, seed: int = 0) -> dict[str, Tensor]:
    """Draw features (B, mels, T) and their mask (B, T). Each row is 7 frames shorter than the one before."""
    generator = torch.Generator().manual_seed(seed)
    length = int(windows * FRAMES)
    features = torch.randn(batch, mels, length, generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, length - 7 * row :] = 0 if row else 1
    return {"input_features": features * mask[:, None], "attention_mask": mask}
