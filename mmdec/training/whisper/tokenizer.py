"""Builds a tokenizer in Whisper's format: byte-level word pieces learned from texts, then Whisper's special tokens in
their order, then the timestamps of a 30 s window (Radford et al. 2022, section 2.3)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer
from transformers import GenerationConfig, WhisperTokenizer

END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = {"translate": "<|translate|>", "transcribe": "<|transcribe|>"}
OTHERS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
PRECISION, WINDOW = 0.02, 30.0  # seconds between two timestamp tokens, and of a window
BYTES = 256


def build_tokenizer(texts: Iterable[str], pieces: int) -> WhisperTokenizer:
    """Build a tokenizer for English. texts: pieces are learned from them. pieces: number of pieces, 256 bytes
    included."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(
        (f" {text}" for text in texts), vocab_size=max(pieces, BYTES), min_frequency=2, show_progress=False
    )
    with tempfile.TemporaryDirectory() as folder:
        learner.save_model(folder)
        vocab = json.loads((Path(folder) / "vocab.json").read_text(encoding="utf-8"))
        lines = (Path(folder) / "merges.txt").read_text(encoding="utf-8").splitlines()
        (Path(folder) / "normalizer.json").write_text("{}", encoding="utf-8")  # no British spellings to convert
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        tokenizer = WhisperTokenizer(
            vocab=vocab, merges=merges, normalizer_file=str(Path(folder) / "normalizer.json"), pad_token=END
        )
    special = [START, "<|en|>", *TASKS.values(), *OTHERS]
    tokenizer.add_special_tokens({"additional_special_tokens": special})  # type: ignore[arg-type] # a list of texts is taken
    stamps = round(WINDOW / PRECISION) + 1
    tokenizer.add_tokens([f"<|{step * PRECISION:.2f}|>" for step in range(stamps)])
    tokenizer.set_prefix_tokens(language="english", task="transcribe")
    return tokenizer


def generation_config(tokenizer: WhisperTokenizer, positions: int) -> GenerationConfig:
    """Return the generation settings for this tokenizer. positions: number of positions of the decoder."""
    number: Any = tokenizer.convert_tokens_to_ids
    end, start = number(END), number(START)
    special = [number(name) for name in (START, "<|en|>", *TASKS.values(), *OTHERS[:3])]
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
        task_to_id={task: number(name) for task, name in TASKS.items()},
        no_timestamps_token_id=number("<|notimestamps|>"),
        prev_sot_token_id=number("<|startofprev|>"),
        max_initial_timestamp_index=50,
        return_timestamps=False,
    )
