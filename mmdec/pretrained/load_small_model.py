"""Makes a drafter from a smaller model.

If the smaller model's vocabulary differs from the target's, the drafter needs the tokenizers of both models.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.drafters.small_model.other_vocabulary import OtherVocabularyDrafter
from mmdec.drafters.small_model.short_prompt import Shorten
from mmdec.drafters.small_model.staged import InnerDrafter
from mmdec.errors import InputError
from mmdec.hub.find import HUB_ID, download
from mmdec.pretrained.language_model import (
    LANGUAGE_MODEL_FILES,
    config_class,
    folder_tokenizer,
    read_language_model,
    read_pretrained,
)
from mmdec.targets.hf_target import HfTarget, source_folder, source_of
from mmdec.targets.registry import make_target
from mmdec.types import Drafter

# model -> (where it was loaded from, tokenizer)
_tokenizers: WeakKeyDictionary[PreTrainedModel, tuple[str, Any]] = WeakKeyDictionary()
# cache: small model -> target -> (the small model's tokenizer, the target's tokenizer, whether their vocabularies
# differ); comparing two vocabularies takes 0.1 s
_known: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, tuple[Any, Any, bool]]]
_known = WeakKeyDictionary()
_lock = Lock()
# share of a vocabulary that may differ, because models with the same tokenizer may name added tokens differently
MAX_FOREIGN_SHARE = 0.01


def small_target(network: PreTrainedModel) -> HfTarget:
    """Wrap the smaller model in an `HfTarget`, which computes its forward passes.

    Raises:
        InputError: If this kind of model cannot draft.
    """
    try:
        return make_target(network)
    except InputError as error:
        raise error.with_names({"model": "drafter"}) from error


def check_small_model(network: PreTrainedModel) -> None:
    """Raise InputError if this kind of model cannot draft."""
    small_target(network)


def small_drafter(
    network: PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: Any = None,
    target_tokenizer: Any = None,
    *,
    inner: InnerDrafter | None = None,
    prompt: int | Shorten | None = None,
) -> Drafter:
    """Make a drafter from a smaller model.

    Args:
        network: The smaller model.
        model: The target model.
        tokenizer: The small model's tokenizer. Default None: the one in the folder that it was loaded from.
        target_tokenizer: The target's tokenizer. Default None: the one in the folder that it was loaded from.
        inner: Drafts the small model's chains; see `mmdec.small_model`.
        prompt: What the small model reads of a long prompt; see `mmdec.small_model`.

    Returns:
        A `SmallModelDrafter`, or an `OtherVocabularyDrafter` if the tokenizers differ.

    Raises:
        InputError: If the vocabularies do not fit and a tokenizer is missing, or if the tokenizers differ and `inner`
            or `prompt` is given.
    """
    small, size = small_target(network), model.config.get_text_config(decoder=True).vocab_size
    if not small.reads_encoder:
        tokenizer_of_small = tokenizer_of(network) if tokenizer is None else tokenizer
        tokenizer_of_target = tokenizer_of(model) if target_tokenizer is None else target_tokenizer
        if tokenizer_of_small is not None and tokenizer_of_target is not None:
            if small.vocab_size > size or _differ(network, model, tokenizer_of_small, tokenizer_of_target):
                option = "inner" if inner is not None else "prompt"
                if inner is not None or prompt is not None:
                    raise InputError(
                        f"`{option}` needs a smaller model with the target's tokenizer, but {small.name} has another. "
                        f"Leave `{option}` out."
                    )
                return OtherVocabularyDrafter(small, tokenizer_of_small, tokenizer_of_target, small.positions, size)
        elif small.vocab_size > size:
            lacking = "the smaller model" if tokenizer_of_small is None else "the target"
            raise InputError(
                f"`drafter` must have at most the target's {size} tokens where {lacking} has no tokenizer in its "
                f"folder, but has {small.vocab_size}. Give folders that hold model and tokenizer, or pass the target's "
                "tokenizer to `mmdec.load_drafter`."
            )
    return SmallModelDrafter(
        small,
        reads_encoder=small.reads_encoder,
        positions=small.positions,
        images=small.reads_images,
        nodes_take_positions=small.nodes_take_positions,
        encode=small.encode if small.encodes_sound else None,
        inner=inner,
        prompt=prompt,
    )


def load_small_model(
    folder: Path,
    model: PreTrainedModel,
    target_tokenizer: Any = None,
    *,
    inner: InnerDrafter | None = None,
    prompt: int | Shorten | None = None,
) -> Drafter:
    """Load a smaller model from a folder and make it a drafter, on the target's device and in its precision.

    Args:
        folder: Holds a language model; for an encoder-decoder target, one of the target's own class.
        model: The target.
        target_tokenizer: The target's tokenizer; None: the one in the folder that the target was loaded from.
        inner: Drafts the small model's chains; see `mmdec.small_model`.
        prompt: What the small model reads of a long prompt; see `mmdec.small_model`.
    """
    network: Any
    config_type = config_class(folder)
    if model.config.is_encoder_decoder and config_type is type(model.config):
        network = read_pretrained(folder, config_type, type(model), "model", "drafter")  # with its encoder
    else:
        network = read_language_model(folder, "drafter")
    network = network.to(model.device, model.dtype)
    return small_drafter(network, model, None, target_tokenizer, inner=inner, prompt=prompt)


def tokenizer_of(model: PreTrainedModel) -> Any:
    """Return the tokenizer of a loaded model; None if there is none.

    It is read from the model's folder, or from the local copy of its hub repository.
    """
    source = source_of(model)
    with _lock:
        if model not in _tokenizers or _tokenizers[model][0] != source:
            _tokenizers[model] = source, _read_tokenizer(source_folder(model), source)
        return _tokenizers[model][1]


def required_tokenizer(model: PreTrainedModel, tokenizer: Any, call: str) -> Any:
    """Return the tokenizer that a drafter of text needs: the given one, else that of the model.

    Args:
        call: The call whose argument `tokenizer` gives one.

    Raises:
        InputError: If there is none.
    """
    if tokenizer is None:
        tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise InputError(
            f"`tokenizer` must be given to `{call}` for a model without one in its folder, but is None. Pass the "
            "model's."
        )
    return tokenizer


def _read_tokenizer(folder: Path | None, source: str) -> Any:
    if folder is None and HUB_ID.fullmatch(source):
        try:
            folder = download(source, LANGUAGE_MODEL_FILES, "drafter", {"local_files_only": True})
        except InputError:
            return None
    return folder_tokenizer(folder)


def _differ(network: PreTrainedModel, model: PreTrainedModel, small_tokenizer: Any, target_tokenizer: Any) -> bool:
    """Return whether the vocabularies differ.

    They do if more than the share `MAX_FOREIGN_SHARE` of the small model's tokens have another id, or none, in the
    target's vocabulary.

    Args:
        small_tokenizer: The small model's tokenizer.
        target_tokenizer: The target's tokenizer.
    """
    with _lock:
        pairs = _known.setdefault(network, WeakKeyDictionary())
        if model not in pairs or pairs[model][0] is not small_tokenizer or pairs[model][1] is not target_tokenizer:
            mine, targets = small_tokenizer.get_vocab(), target_tokenizer.get_vocab()
            foreign = sum(targets.get(token) != number for token, number in mine.items())
            pairs[model] = small_tokenizer, target_tokenizer, foreign > MAX_FOREIGN_SHARE * len(mine)
        return pairs[model][2]
