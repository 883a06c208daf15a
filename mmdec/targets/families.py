"""Decides which language models are accepted: families covered by tests, and others that pass a test at run time.

A family is a model class of transformers. `tests/exactness/test_families.py` tests each family: greedy texts with and
without drafts are equal, and a tree's nodes get the same logits as in their paths alone. Any other class is tested with
a small random model (`probe.py`) once per configuration. A family is tested in this way, too, if its configuration has
an attention window or is not that of a decoder.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.utils import logging

from mmdec.checks.files import error_line
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.probe import (
    IDENTITY_FIELDS,
    MAX_DIFFERENCE,
    PROBE_VOCABULARY,
    PROBE_WINDOW,
    Scorer,
    is_window,
    possible_window_fields,
    tree_path_difference,
)
from mmdec.targets.recurrent_cache import STATE_CACHE, has_only_states, has_states
from mmdec.targets.ropes import growing_ropes

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager", TREE_ATTENTION)
# cache layers from which tokens can be removed
CROPPABLE_LAYERS = frozenset({DynamicLayer, DynamicSlidingWindowLayer, DummyLayer})
# cache layers with recurrent states
RECURRENT_LAYERS = frozenset({LinearAttentionLayer, LinearAttentionAndFullAttentionLayer})
ARGUMENTS = ("input_ids", "attention_mask", "position_ids", CACHE_ARGUMENT, "logits_to_keep")
ATTENTION_FAMILIES = """
    AXK1 Apertus Arcee AriaText BigBird BioGpt BitNet Camembert CodeGen Cohere Data2VecText DeepseekV2
    DeepseekV3 DiffLlama Dots1 Electra Ernie Ernie4_5 Ernie4_5_Moe Exaone4 Falcon FlexOlmo GPTBigCode GPTJ GPTNeo
    GPTNeoX GPTNeoXJapanese Gemma Glm Glm4 Glm4Moe Glm4MoeLite Granite GraniteMoe GraniteMoeShared HYV3 Helium
    HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Jais2 JetMoe Llama LongcatFlash MegatronBert MiniCPM3 MiniMaxM2 Ministral3
    Mistral Mixtral NanoChat Nemotron OPT Olmo Olmo2 Olmoe Persimmon Phi Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe
    RemBert Roberta RobertaPreLayerNorm SeedOss SmolLM3 SolarOpen StableLm Starcoder2 XGLM XLMRoberta XLMRobertaXL Youtu
"""
# models with recurrent or convolutional layers; tests/exactness/test_recurrent.py tests each
RECURRENT_FAMILIES = """
    BailingHybrid Bamba FalconH1 FalconMamba GraniteMoeHybrid Jamba KimiLinear Lfm2 Lfm2Moe Lfm3 Mamba Mamba2 NemotronH
    OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe Zamba2 Zaya
"""
ALIBI_CLASSES = ("BloomForCausalLM", "MptForCausalLM")  # of their positions, ALiBi's bias is all that they know
OTHER_CLASSES = ("BertGenerationDecoder", "BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel")
# supported models for images, as beginnings of class names; tests/exactness/test_vision.py and test_media.py test
# each
VISION_FAMILIES = """
    AyaVision Cohere2Vision DeepseekVL Gemma3 Gemma4 Glm4v Glm4vMoe GlmOcr GotOcr2 Idefics2 Idefics3 InternVL Janus
    Kimi_K25 LightOnOcr Llama4 Llava LlavaNext LlavaOnevision Mistral3 Ovis2 PaliGemma Qwen2VL Qwen2_5_VL Qwen3VL
    Qwen3VLMoe SmolVLM Qwen2_5OmniThinker VideoLlava VipLlava
"""
AUDIO_FAMILIES = "AudioFlamingo3 GlmAsr GraniteSpeech MusicFlamingo Qwen2Audio Qwen3ASR Voxtral"
MEDIA_FAMILIES = f"{VISION_FAMILIES} {AUDIO_FAMILIES}"
# encoder-decoders; tests/exactness/test_encoder_decoders.py tests each
ENCODER_DECODER_FAMILIES = """
    Bart BigBirdPegasus Blenderbot BlenderbotSmall M2M100 MBart MT5 Marian Moonshine Mvp PLBart Pegasus SeamlessM4T
    SeamlessM4Tv2 Speech2Text T5 UMT5
"""
UNSUPPORTED_CLASSES = {  # class that is not supported -> the reason, for the error message
    "Blip2ForConditionalGeneration": "its `generate` takes the language model's part",
    "MllamaForConditionalGeneration": "it reads pictures by cross attention, whose columns no draft may touch",
    "Phi4MultimodalForCausalLM": "its rope changes with the text's length, and pictures and sound have adapters",
    "Qwen2_5OmniForConditionalGeneration": "it also speaks; only its `thinker` is supported",
    "Qwen3_5ForConditionalGeneration": "its language model has recurrent states and positions of three axes",
}
FAMILIES = frozenset(
    [*(f"{name}ForCausalLM" for name in (ATTENTION_FAMILIES + RECURRENT_FAMILIES).split()), *OTHER_CLASSES]
)
MEDIA_CLASSES = frozenset(f"{name}ForConditionalGeneration" for name in MEDIA_FAMILIES.split())
ENCODER_DECODER_CLASSES = frozenset(
    name + end
    for name in ENCODER_DECODER_FAMILIES.split()
    for end in ("ForConditionalGeneration", "MTModel", "ForTextToText", "ForSpeechToText")
)
_probing = Lock()


def check_text_model(model: PreTrainedModel, scorer: Scorer) -> None:
    """Raise InputError unless the model is a causal language model that can score trees and roll them back.

    Args:
        scorer: Makes a target, without checks, for the small random model with which an unknown class is tested.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):  # callers may ignore the types
        raise InputError(f"`model` must be a model of transformers, but is {kind}. Load it with AutoModelForCausalLM.")
    if has_alibi(model):
        raise InputError(
            f"`model` must take the positions of a draft's tokens, but {kind} adds ALiBi's bias, which counts columns. "
            "Decode with `model.generate`, without mmdec."
        )
    if not is_decoder_only(model):
        raise InputError(
            f"`model` must be a decoder-only language model with a key-value cache, but is {kind}. {list_families()}"
        )
    check_decoder(kind, model.config, text=True)
    check_proof(type(model), model.config, scorer)


def has_alibi(model: PreTrainedModel) -> bool:
    """Return whether the model's layers add ALiBi's bias: Bloom, MPT, and Falcon where its configuration says so."""
    return type(model).__name__ in ALIBI_CLASSES or bool(getattr(model.config, "alibi", False))


def check_decoder(kind: str, config: PreTrainedConfig, text: bool = False) -> None:
    """Raise InputError if drafts cannot be scored or rolled back under this configuration.

    Args:
        kind: Name of the model's class.
        text: Whether it is a text-only model. Only text-only models may have recurrent or convolutional layers, and
            rotary positions that change with the text's length.
    """
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    foreign = sorted(layer.__name__ for layer in kinds - CROPPABLE_LAYERS - (RECURRENT_LAYERS if text else frozenset()))
    if foreign:
        raise InputError(
            f"`model` must have layers from which drafts can be removed, but {kind} has {', '.join(foreign)}. Choose "
            "another model."
        )
    # GPT-Neo's local attention has a window over cache indices; its cache layers do not show this window
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise InputError(
            f"`model` must attend to all earlier tokens in every layer, but {kind} has local layers, and no draft fits "
            "into their window. Choose a model without them."
        )
    attention = config._attn_implementation
    if attention not in ATTENTION_IMPLEMENTATIONS:
        raise InputError(
            f"`attn_implementation` must be one of {', '.join(ATTENTION_IMPLEMENTATIONS)}, but is {attention}, "
            'which cannot mask a tree. Call `model.set_attn_implementation("sdpa")`.'
        )
    if not text and (ropes := growing_ropes(config)):
        raise InputError(
            f"`rope_type` must not depend on the text's length, but is {ropes[0].kind}: a draft would change it early. "
            "Choose a model with another one."
        )


def check_proof(kind: type[PreTrainedModel], config: PreTrainedConfig, scorer: Scorer) -> None:
    """Raise InputError unless tests cover the class, or a small random model of this class passes the test at run time.

    Args:
        scorer: Makes a target for the small model.
    """
    if not _is_proven(kind, config):
        _check_probe(kind, config, str(config._attn_implementation), scorer)


def is_decoder_only(model: PreTrainedModel) -> bool:
    """Return whether this is a text-only decoder.

    Its `forward` has the arguments that a draft's pass needs, and its configuration is that of a language model.
    """
    config = model.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        return False
    return not lacking_arguments(model) and model.can_generate()


def lacking_arguments(model: PreTrainedModel) -> list[str]:
    """Return the arguments that a draft's pass needs but the model's `forward` does not have."""
    arguments = inspect.signature(model.forward).parameters
    # a purely recurrent model needs no positions, and may have another name for its cache
    needed = [STATE_CACHE if name == CACHE_ARGUMENT and STATE_CACHE in arguments else name for name in ARGUMENTS]
    lacking = [name for name in needed if name not in arguments]
    placeless = lacking == ["position_ids"] and (has_alibi(model) or has_only_states(model.config))
    return [] if placeless else lacking


def check_forward(model: PreTrainedModel) -> None:
    """Raise InputError if the model's `forward` was replaced by one without the arguments that a draft's pass needs."""
    lacking = lacking_arguments(model)
    if lacking and any(_is_family(kind) for kind in type(model).__mro__):
        raise InputError(
            f"`model.forward` must name {', '.join(ARGUMENTS)}, but that of this {type(model).__name__} does not name "
            f"{', '.join(lacking)}: it is not transformers' own. Decorate it with `@functools.wraps` of the original."
        )


def reads_pictures(kind: type[PreTrainedModel]) -> bool:
    """Return whether models of this class read images: whether `forward` has an argument for pixels."""
    return "pixel_values" in inspect.signature(kind.forward).parameters


def _is_family(kind: type) -> bool:
    return kind.__name__ in FAMILIES and kind.__module__.startswith("transformers.models.")


def _is_proven(kind: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Return whether tests cover the class together with the features that its configuration enables."""
    if not _is_family(kind):
        return False
    fields = vars(config)
    return fields.get("is_decoder") is not False and not any(is_window(*field) for field in fields.items())


def _check_probe(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str, scorer: Scorer) -> None:
    """Raise an InputError if a small random model of this class scores a tree otherwise than its paths."""
    shape = {name: value for name, value in config.to_dict().items() if name not in IDENTITY_FIELDS}
    with _probing:
        try:
            fault = _probe(kind, type(config), json.dumps(shape, sort_keys=True, default=str), attention, scorer)
        except InputError as error:  # the small model is not supported, so the given model is not, either
            raise InputError(str(error).replace(", but ", f", but {kind.__name__} ", 1)) from error
    if fault:
        switch = "Set `is_decoder` in its configuration. " if getattr(config, "is_decoder", None) is False else ""
        named, works = kind.__name__, list_families()
        if has_states(config):
            raise InputError(
                f"`model` must score several tokens in a pass as it scores them one by one, but {named} {fault}, so "
                f"its states would be wrong after a draft. {works}"
            )
        if reads_pictures(kind):
            named, works = (
                f"{named} reads pictures in its own way, and",
                f"Of models that do, {', '.join(VISION_FAMILIES.split())} work.",
            )
        raise InputError(
            f"`model` must score a tree of tokens as it scores each path, but {named} {fault}. {switch}{works}"
        )


@lru_cache(256)
def _probe(
    kind: type[PreTrainedModel], config: type[PreTrainedConfig], fields: str, attention: str, scorer: Scorer
) -> str:
    """Test a small random model of this class and configuration.

    Args:
        config: The configuration's class.
        fields: Its values, as JSON.
        attention: The attention implementation.
        scorer: Makes a target for the small model.

    Returns:
        What is wrong, or "" if nothing is.
    """
    settings: dict[str, Any] = json.loads(fields)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # hide warnings about the small random model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apart = tree_path_difference(kind, config.from_dict(settings), attention, scorer)
            for name in possible_window_fields(kind, config, settings):
                with suppress(Exception):  # a class that rejects a smaller value has no window there
                    apart = max(
                        apart,
                        tree_path_difference(
                            kind, config.from_dict({**settings, name: PROBE_WINDOW}), attention, scorer
                        ),
                    )
    except InputError:
        raise
    except Exception as error:  # a class from outside transformers may raise anything
        return (
            f"is not known, and could not be tried: two layers of it with {PROBE_VOCABULARY} tokens fail "
            f"({error_line(error)})"
        )
    finally:
        logging.set_verbosity(verbosity)
    return "" if apart <= MAX_DIFFERENCE else f"differs by {apart:.1g} of its largest logit"


def list_families() -> str:
    """Return a sentence that lists the supported families, for error messages."""
    names = sorted(re.sub("ForCausalLM|LMHeadModel|Decoder$", "", name) for name in FAMILIES)
    return f"These families work: {', '.join(names)}."


def list_media_families() -> str:
    """Return a sentence that lists the supported families that see or hear, for error messages."""
    return f"These that see or hear work: {', '.join(MEDIA_FAMILIES.split())}."
