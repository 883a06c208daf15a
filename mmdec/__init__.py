"""Parallel decoding for speech, vision-language and language models. Names are imported, with torch, on first use."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmdec.compat import check_transformers
from mmdec.errors import BatchError, InputError, MmdecError

if TYPE_CHECKING:
    from mmdec.core.token_groups import TokenGroups
    from mmdec.core.verify import Relaxation, register_rule
    from mmdec.daspeech.translate import Translation, translate_speech
    from mmdec.drafters.registry import register_drafter
    from mmdec.generation import register_attention
    from mmdec.generation.corpus_source import corpus
    from mmdec.generation.diffusion import CanvasGeneration, CanvasOptions, diffusion_generate
    from mmdec.generation.generate import Generation, generate, speculate, stream
    from mmdec.generation.model_lock import model_lock
    from mmdec.generation.small_model_source import small_model
    from mmdec.generation.speculation import DecodingStatistics, default_statistics
    from mmdec.io import audio
    from mmdec.loading import load
    from mmdec.pretrained.drafters import load_drafter
    from mmdec.targets.registry import register_target
    from mmdec.types import Round
    from mmdec.vision.answer import Description
    from mmdec.vision.chat import Chat
    from mmdec.vision.describe import describe
    from mmdec.whisper.hypothesis_call import hypothesis
    from mmdec.whisper.live import StreamUpdate, transcribe_stream
    from mmdec.whisper.transcribe import transcribe
    from mmdec.whisper.transcript import Segment, Transcript, Word

__version__ = "0.1.0"
__all__ = [
    "BatchError",
    "CanvasGeneration",
    "CanvasOptions",
    "Chat",
    "DecodingStatistics",
    "Description",
    "Generation",
    "InputError",
    "MmdecError",
    "Relaxation",
    "Round",
    "Segment",
    "StreamUpdate",
    "TokenGroups",
    "Transcript",
    "Translation",
    "Word",
    "__version__",
    "audio",
    "corpus",
    "default_statistics",
    "describe",
    "diffusion_generate",
    "generate",
    "hypothesis",
    "load",
    "load_drafter",
    "model_lock",
    "register_attention",
    "register_drafter",
    "register_rule",
    "register_target",
    "small_model",
    "speculate",
    "stream",
    "transcribe",
    "transcribe_stream",
    "translate_speech",
]

_LAZY = {
    **dict.fromkeys(("Translation", "translate_speech"), "mmdec.daspeech.translate"),
    **dict.fromkeys(("Generation", "generate", "speculate", "stream"), "mmdec.generation.generate"),
    **dict.fromkeys(("Segment", "Transcript", "Word"), "mmdec.whisper.transcript"),
    **dict.fromkeys(("StreamUpdate", "transcribe_stream"), "mmdec.whisper.live"),
    **dict.fromkeys(("CanvasGeneration", "CanvasOptions", "diffusion_generate"), "mmdec.generation.diffusion"),
    "Chat": "mmdec.vision.chat",
    **dict.fromkeys(("Relaxation", "register_rule"), "mmdec.core.verify"),
    "Round": "mmdec.types",
    "TokenGroups": "mmdec.core.token_groups",
    "Description": "mmdec.vision.answer",
    "corpus": "mmdec.generation.corpus_source",
    "describe": "mmdec.vision.describe",
    "hypothesis": "mmdec.whisper.hypothesis_call",
    "load": "mmdec.loading",
    "load_drafter": "mmdec.pretrained.drafters",
    **dict.fromkeys(("DecodingStatistics", "default_statistics"), "mmdec.generation.speculation"),
    "model_lock": "mmdec.generation.model_lock",
    "register_attention": "mmdec.generation",
    "register_drafter": "mmdec.drafters.registry",
    "register_target": "mmdec.targets.registry",
    "small_model": "mmdec.generation.small_model_source",
    "transcribe": "mmdec.whisper.transcribe",
}
_MODULES = {"audio": "mmdec.io.audio"}
# the application decides which messages are shown, and where
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module 'mmdec' has no attribute {name!r}")
    check_transformers()
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
