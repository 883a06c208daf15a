"""Loads weights from one folder's safetensors files, checks them, and fills networks with them.

The weights must be complete and finite. A folder is not trusted: an index may not name files outside the folder, and a
configuration may not describe a network larger than its weights. Each violation raises InputError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mmdec.checks.devices import PASSED_ON
from mmdec.checks.files import printable
from mmdec.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


WEIGHTS_SUFFIX = ".safetensors"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
MAX_JSON_BYTES = 64 * 2**20
ALL_TENSORS = ("",)  # a value for `prefixes` that selects every tensor, because every name begins with ""
COUNT_SUFFIXES = ("layers", "blocks")  # a setting whose name ends with one of these is the number of a network's layers
# settings with this prefix are limits, not numbers of layers: Qwen's `max_window_layers` is 80 in models of any depth
LIMIT_PREFIX = "max_"
# Settings that make transformers download or run code, or read files outside the folder. They are rejected.
REJECTED_SETTINGS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "fusion_config",
    "kernel_config",
    "transformers_weights",
)
# Settings that are numbers of attention heads, each with the setting that it must divide (the channels). "": it need
# only be positive.
CHANNELS_OF_HEADS = {"heads": "d_model", "link_heads": ""}
N = TypeVar("N", bound=nn.Module)
P = TypeVar("P", bound="PreTrainedModel")


@contextmanager
def report_damage(message: str, remedy: str = "Download it again.") -> Iterator[None]:
    """Context manager: if the block raises any error, raise InputError instead.

    Libraries raise errors of many types for damaged files.

    Args:
        message: What the file must be, and what is wrong with it.
        remedy: The message's last sentence.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as error:
        raise InputError(f"{message} ({type(error).__name__}: {error!s:.300}). {remedy}") from error


def check_checkpoint_folder(source: str | os.PathLike[str]) -> Path:
    """Return the folder of a published checkpoint, a call's argument `source`.

    Raises:
        InputError: If it is no folder, or has no config.json.
    """
    folder = Path(source)
    if not (folder / "config.json").is_file():
        lacks = "does not" if folder.is_dir() else "is not a folder"
        raise InputError(f"`source` must hold config.json, but '{folder}' {lacks}. Give the checkpoint's folder.")
    return folder


def read_settings(file: Path, argument: str = "model") -> dict[str, Any]:
    """Read a JSON object.

    Args:
        argument: The name of the caller's argument.

    Raises:
        InputError: If the file is missing or malformed.
    """
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
        if not file.is_file():  # refuse pipes and devices: reading /dev/zero, for example, never ends
            raise ValueError("it is not a regular file")
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it holds a {type(settings).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"`{argument}` must hold {file.name} as a JSON object, but '{file}' is damaged or of another version "
            f"({error}). Download it again."
        ) from error
    return settings


def weight_files(folder: Path, argument: str = "model", prefixes: tuple[str, ...] = ALL_TENSORS) -> list[Path]:
    """Return the weight files of a folder that transformers wrote.

    They are the single safetensors file, or the files that the folder's index lists.

    Args:
        argument: Name of the caller's argument, for errors.
        prefixes: Only tensors whose names begin with one of these are needed.

    Raises:
        InputError: Unless each file is a safetensors file inside the folder.
    """
    if (folder / WEIGHTS_FILE).is_file() or not (folder / WEIGHTS_INDEX).is_file():
        return [weight_file(folder, WEIGHTS_FILE, argument)]
    names = read_settings(folder / WEIGHTS_INDEX, argument).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(
            f"`{argument}` must name a file for each tensor in the `weight_map` of {WEIGHTS_INDEX}, but "
            f"'{folder / WEIGHTS_INDEX}' does not. Download it again."
        )
    return [
        weight_file(folder, name, argument)
        for name in sorted({file for tensor, file in names.items() if tensor.startswith(prefixes)})
    ]


def weight_file(folder: Path, name: str, argument: str = "model") -> Path:
    """Return the path of a safetensors file in a folder.

    A file in the cache of the Hugging Face hub may be a link to the cache's `blobs` folder, which counts as inside.

    Raises:
        InputError: If the file is missing, is a pickle, or lies outside the folder.
    """
    file, shown = folder / name, printable(name)
    if not name.endswith(WEIGHTS_SUFFIX):
        raise InputError(
            f"`{argument}` must hold its weights as safetensors, but '{folder}' names '{shown}'. Pickles are not read: "
            "save it with `save_pretrained`."
        )
    if Path(name).name != name or "\\" in name or not lies_inside(file, folder):
        raise InputError(
            f"`{argument}` must hold its weights in its own folder, but '{shown}' of '{folder}' lies outside. Copy the "
            "file there."
        )
    try:
        there = file.is_file()
    except OSError:  # no file can have this name
        there = False
    if not there:
        alone = name == WEIGHTS_FILE and folder.is_dir()
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES) if alone else []
        fault = f"holds a pickle, {pickles[0]}, which is not read" if pickles else f"lacks '{shown}'"
        raise InputError(
            f"`{argument}` must hold its weights as safetensors, but '{folder}' {fault}. Download all its shards, "
            "or save it with `save_pretrained`."
        )
    return file


def lies_inside(file: Path, folder: Path) -> bool:
    """Return whether the real path of a file or folder is inside `folder`, or in the hub cache's `blobs`.

    The hub cache is the one that holds `folder`.
    """
    try:
        real, home = file.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # a circular link, or an invalid name
        return False
    blobs = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    return any(real.is_relative_to(allowed) for allowed in (home, *blobs))


def read_weights(
    files: Sequence[Path], argument: str = "model", prefixes: tuple[str, ...] = ALL_TENSORS
) -> dict[str, Tensor]:
    """Read the tensors whose names begin with one of `prefixes`, by name.

    Raises:
        InputError: If a file is damaged or a tensor is not finite.
    """
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith(prefixes)]  # noqa: SIM118 # no mapping
                tensors = {name: opened.get_tensor(name) for name in names}
        except Exception as error:  # safetensors raises various errors for a damaged file
            raise InputError(
                f"`{argument}` must hold whole safetensors, but '{file}' is damaged or of another version ({error}). "
                "Download it again."
            ) from error
        check_finite_weights(tensors, file, argument)
        state |= tensors
    return state


def check_finite_weights(state: Mapping[str, Tensor], source: Path, argument: str = "model") -> None:
    """Raise InputError, which names the tensor, if a tensor holds NaN or infinity."""
    for name, tensor in state.items():
        if not is_finite(tensor):
            raise InputError(
                f"`{argument}` must hold finite weights, but '{name}' in '{source}' holds NaN or infinity. Download it "
                "again, or train it again."
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite, also after conversion to float32."""
    if tensor.is_complex():  # float() would drop the imaginary part
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # float8 has no `aminmax`
        tensor = tensor.float()
    low, high = tensor.aminmax()  # `aminmax` returns NaN if there is one, and does not copy the tensor
    # converted to float32, for which a float64 may be too large
    return bool(low.float().isfinite()) and bool(high.float().isfinite())


def check_layer_counts(settings: Mapping[Any, Any], state: Mapping[str, Tensor], argument: str = "model") -> None:
    """Check numbers of layers and heads in a configuration before a network is built from it.

    Args:
        settings: The configuration.
        state: The tensors by name.

    Raises:
        InputError: If the configuration has more layers than there are tensors: otherwise it could describe a network
            of any size. Also raises it if the channels are not divisible by the number of heads, which the shapes of
            the tensors do not show.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            check_layer_counts(value, state, argument)
        elif _is_count(str(name)) and isinstance(value, int) and value > len(state):
            raise InputError(
                f"`{argument}` must have weights for all of its layers, but `{name}` is {value} for {len(state)} "
                "tensors. Download it again."
            )
        elif name in CHANNELS_OF_HEADS and not (
            type(value) is int and value > 0 and settings.get(CHANNELS_OF_HEADS[name], value) % value == 0
        ):
            raise InputError(
                f"`{argument}` must divide its channels into heads, but `{name}` is {value!r:.60}. Download it again."
            )


def _is_count(name: str) -> bool:
    return name.endswith(COUNT_SUFFIXES) and not name.startswith(LIMIT_PREFIX)


def build_with_weights(build: Callable[[], N], state: Mapping[str, Tensor], argument: str, source: Path) -> N:
    """Build a network and load weights into it, in float32.

    Args:
        build: Makes the network.
        state: The tensors by name.
        source: Their file or folder, for error messages.

    Raises:
        InputError: If names or shapes do not match. This is checked before memory is allocated.
    """
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in build().state_dict().items()}
    absent, foreign = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    if absent:
        raise InputError(
            f"`{argument}` must hold all weights, but '{source}' lacks '{absent[0]}', {len(absent)} in all. "
            "Download it again."
        )
    if foreign:
        raise InputError(
            f"`{argument}` must hold the weights that its config asks for, but '{source}' holds '{foreign[0]}', "
            f"{len(foreign)} unknown tensors in all. Download it again."
        )
    _check_shapes(state, shapes, argument, source)
    network = build()
    network.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in state.items()})
    return network


def load_pretrained(
    network: type[P], config: PreTrainedConfig, folder: Path, argument: str = "model", converted: bool = True
) -> P:
    """Load the weights in `folder` into one of transformers' networks, in float32 and evaluation mode.

    Args:
        network: The class.
        config: Its configuration, which the caller has read from the folder.
        converted: Whether transformers converts weights of this kind of model when it loads them. If not, they are put
            into the network as they are, if they are complete: transformers' table of conversions alone takes longer.

    Raises:
        InputError: If weights are missing, have other shapes, are damaged or are not finite.
    """
    state = read_weights(weight_files(folder, argument), argument)
    check_layer_counts(config.to_dict(), state, argument)
    config.dtype = torch.float32
    with torch.device("meta"):
        empty = network(config)
    shapes = {name: value.shape for name, value in empty.state_dict().items()}
    _check_shapes({name: value for name, value in state.items() if name in shapes}, shapes, argument, folder)
    # buffers that no file holds would stay empty
    needed = {name for name, _ in (*empty.named_parameters(), *empty.named_buffers())}
    complete = needed - empty.all_tied_weights_keys.keys() <= state.keys()
    if complete and not converted and getattr(config, "quantization_config", None) is None:
        empty.load_state_dict({name: value.float() for name, value in state.items()}, strict=False, assign=True)
        empty.tie_weights()
        empty.config._name_or_path = str(folder)
        return empty.eval()
    from transformers.utils import logging  # imported here because it imports much of transformers

    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # loading takes less than a second, and stderr belongs to the caller
    logging.set_verbosity_error()  # missing weights raise the error below instead of a warning
    try:
        loaded: Any = network.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
    model, report = loaded
    absent = sorted(report["missing_keys"])
    if absent:  # missing weights: transformers would initialise them at random, without an error
        raise InputError(
            f"`{argument}` must hold all weights, but '{folder}' lacks '{absent[0]}', {len(absent)} in all. "
            "Download it again."
        )
    model.config._name_or_path = str(folder)
    return model


def _check_shapes(
    state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], argument: str, source: str | Path
) -> None:
    for name, value in state.items():
        if value.shape != shapes[name]:
            raise InputError(
                f"`{argument}` must hold weights of its config's shapes, but '{name}' in '{source}' is "
                f"{tuple(value.shape)} and not {tuple(shapes[name])}. Download both again."
            )


def check_generation(settings: Any, config: Any, folder: Path) -> None:
    """Raise InputError if the generation config or the model's config has a value impossible for this model.

    An example is a token id beyond the vocabulary.
    """

    def is_id(value: Any) -> bool:
        return type(value) is int and 0 <= value < config.vocab_size

    def is_ids(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is int and -1 <= item < config.vocab_size for item in value)

    def is_table(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(name, str) and is_id(item) for name, item in value.items())

    def is_heads(value: Any) -> bool:
        # a distilled model may name heads of layers that it no longer has; then words get no times, but there is text
        return isinstance(value, list) and all(
            isinstance(pair, list) and [type(item) for item in pair] == [int, int] and min(pair) >= 0 for pair in value
        )

    def is_length(value: Any) -> bool:
        return type(value) is int and 1 <= value <= 2**31

    def is_switch(value: Any) -> bool:
        return isinstance(value, bool)

    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(
            ("bos_token_id", "decoder_start_token_id", "no_timestamps_token_id", "pad_token_id", "prev_sot_token_id"),
            (is_id, f"a token from 0 to {config.vocab_size - 1}"),
        ),
        "eos_token_id": (lambda value: is_id(value) or is_ids(value), "a token, or a list of tokens"),
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), (is_ids, "a list of tokens")),
        **dict.fromkeys(("lang_to_id", "task_to_id"), (is_table, "names with their tokens")),
        "alignment_heads": (is_heads, "pairs of a decoder layer and a head"),
        **dict.fromkeys(("max_length", "max_new_tokens"), (is_length, "a whole number of at least 1")),
        "max_initial_timestamp_index": (lambda value: type(value) is int and value >= 0, "a whole number"),
        **dict.fromkeys(("is_multilingual", "return_timestamps", "do_sample"), (is_switch, "true or false")),
    }
    for name, (fits, rule) in rules.items():
        value = getattr(settings, name, None)
        if value is not None and not fits(value):
            raise InputError(
                f"`{name}` must be {rule}, but the generation config of '{folder}' has {value!r:.100}. "
                "Download it again."
            )
    try:
        settings.validate()
    except Exception as error:  # wrong types fail wherever they are first compared
        raise InputError(
            f"`model` must have a generation config that `generate` takes, but that of '{folder}' is refused "
            f"({error!s:.300}). Download it again."
        ) from error


def read_pickle(path: Path, remedy: str) -> Any:
    """Read the pickle of a published checkpoint; only tensors and the types that torch considers safe are created.

    Args:
        remedy: The error's last sentence.

    Raises:
        InputError: If the pickle is damaged or names other classes.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises various errors
        raise InputError(
            f"`source` must be a checkpoint of tensors and plain values, but '{path}' is damaged or asks for more "
            f"({type(error).__name__}: {error!s:.300}). {remedy}"
        ) from error


# maximum values of the feature extractor's settings; published models have 128 mel bands and FFTs of 400
MAX_EXTRACTOR_SETTINGS = {
    "feature_size": 1024,
    "n_fft": 2**14,
    "hop_length": 2**14,
    "chunk_length": 3600,
    "sampling_rate": 192_000,
}
# file names of the feature extractor's settings: in current and in earlier versions of transformers
EXTRACTOR_FILES = ("processor_config.json", "preprocessor_config.json")


def check_extractor(folder: Path) -> None:
    """Raise InputError if a setting of the feature extractor is larger than in any published model.

    Its filters could exhaust the memory.
    """
    for name in EXTRACTOR_FILES:
        if not (folder / name).is_file():
            continue
        settings = read_settings(folder / name)
        sizes = settings.get("feature_extractor", settings)
        for key, maximum in MAX_EXTRACTOR_SETTINGS.items():
            value = sizes.get(key, 1) if isinstance(sizes, dict) else None
            if type(value) is not int or not 1 <= value <= maximum:
                raise InputError(
                    f"`{key}` must be a whole number from 1 to {maximum}, but {name} of '{folder}' has {value!r:.100}. "
                    "Download it again."
                )
