"""Folders of audio language models: a small random model of a family, with the processor of this family."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

from tests.support.media_models import FOR, OWN, family_model
from tests.support.tiny_llava import build_tokenizer
from tests.support.tiny_vlm_folder import TEXTS, configure, settings

MARKS = {  # family -> special tokens of its tokenizer, by the attribute names that its processor uses
    "AudioFlamingo3": {"audio_token": "<sound>"},
    "GlmAsr": {"audio_token": "<|pad|>"},
    "GraniteSpeech": {"audio_token": "<|audio|>"},
    "MusicFlamingo": {
        "audio_token": "<sound>",
        "audio_bos_token": "<|sound_bos|>",
        "audio_eos_token": "<|sound_eos|>",
    },
    "Qwen2Audio": {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    "Qwen3ASR": {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
        "asr_text_token": "<asr_text>",
    },
}
FAMILIES = tuple(MARKS)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}MARK{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if not loop.last %} {% endif %}{% endfor %}{% if add_generation_prompt %} assistant: {% endif %}"
)
SPOKEN = (  # a template for messages of text only
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{% endfor %} assistant:"
)
TEKKEN = (
    "INST /INST AVAILABLE_TOOLS /AVAILABLE_TOOLS TOOL_RESULTS /TOOL_RESULTS TOOL_CALLS IMG PAD IMG_BREAK "
    "IMG_END PREFIX MIDDLE SUFFIX SYSTEM_PROMPT /SYSTEM_PROMPT TOOL_CONTENT ARGS CALL_ID THINK /THINK "
    "AUDIO BEGIN_AUDIO TRANSCRIBE"
)
SECONDS = 2  # length of a window
RATE = 16000


def hearing(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Build a model and its processor."""
    marks = MARKS[family]
    base: Any = build_tokenizer(TEXTS * 3, 340)
    base.add_tokens([*marks.values()], special_tokens=True)
    named = {"bos_token": base.bos_token, "eos_token": base.eos_token, "pad_token": base.pad_token}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base._tokenizer, extra_special_tokens=marks, padding_side="left", **named
    )
    mark = tokenizer.convert_tokens_to_ids(marks["audio_token"])
    own: dict[str, Any] = {
        **OWN.get(family + FOR, {}),
        "audio_token_id": mark,
        "audio_token_index": mark,
        "audio_config.max_source_positions": 50 * SECONDS,
        "text_config.vocab_size": len(tokenizer),
        "text_config.pad_token_id": tokenizer.pad_token_id,
        "text_config.tie_word_embeddings": False,
    }
    if family == "GraniteSpeech":
        own["encoder_config.input_dim"] = 160  # 80 mels of two frames: a saved processor always has 80 mels
    model = family_model(family, own, seed)
    configure(model, tokenizer)
    return model, processor(family, tokenizer)


def processor(family: str, tokenizer: Any) -> Any:
    """Build the family's processor."""
    kind: Any = getattr(transformers, family + "Processor")
    marks = MARKS[family]
    if family == "GraniteSpeech":
        sound: Any = transformers.GraniteSpeechFeatureExtractor(projector_window_size=4, projector_downsample_rate=2)
        return kind(sound, tokenizer, chat_template=SPOKEN)
    if family == "Qwen3ASR":
        sound = transformers.Qwen3ASRFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    else:
        sound = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    around = marks["audio_token"]
    if family in ("Qwen2Audio", "Qwen3ASR"):
        around = marks["audio_bos_token"] + around + marks["audio_eos_token"]
    return kind(sound, tokenizer, chat_template=TEMPLATE.replace("MARK", around))


def voxtral(folder: Path, seed: int = 0) -> Path:
    """Write a Voxtral folder in Mistral's layout. Each token of its tokenizer is one byte; special tokens have the ids
    that transformers expects. Windows have 30 s."""
    marks = ["<unk>", "<s>", "</s>", *(f"[{mark}]" for mark in TEKKEN.split())]
    marks[11] = "<pad>"
    vocabulary = [{"rank": at, "token_bytes": b64encode(bytes([at])).decode(), "token_str": None} for at in range(256)]
    size = {"default_vocab_size": 256 + len(marks), "default_num_special_tokens": len(marks), "num_vocab_tokens": 256}
    spectrum = {"num_mel_bins": 16, "hop_length": 160, "window_size": 400}
    sound = {"sampling_rate": RATE, "frame_rate": 12.5, "audio_encoding_config": spectrum, "chunk_length_s": 30.0}
    tokens = {
        "config": {"pattern": ".+", "version": "v11", **size},
        "vocab": vocabulary,
        "special_tokens": [{"rank": at, "token_str": mark, "is_control": True} for at, mark in enumerate(marks)],
        "audio": sound,
    }
    own = {
        "audio_token_id": 24,
        "audio_config.intermediate_size": 128,
        "audio_config.max_source_positions": 1500,
        "text_config.vocab_size": size["default_vocab_size"],
    }
    model = family_model("Voxtral", own, seed)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 11
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
    (folder / "tekken.json").write_text(json.dumps(tokens))
    settings(folder, "preprocessor_config.json", processor_class="VoxtralProcessor")
    return folder


def write(family: str, folder: Path, seed: int = 0) -> Path:
    model, made = hearing(family, seed)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
