"""Registers mmdec's models with transformers' `AutoModel`: `AutoModel.from_pretrained(folder or hub id)`.

    model = AutoModel.from_pretrained("runs/translator")         # a DASpeechModel
    drafter = AutoModel.from_pretrained("owner/eagle-for-mine")  # a DrafterModel

This works after `mmdec.register()`, for folders whose config.json has the entry `model_type`, as all that mmdec writes
now. (The classes below also read older folders without this entry.) mmdec's own loaders read and write the folders:
only safetensors inside the folder, no pickle, no remote code. For translating or drafting, use `mmdec.load` and
`mmdec.load_drafter`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from mmdec.hub.find import drafter_path, find
from mmdec.hub.publish import push_folder
from mmdec.types import InputError

DASPEECH, DRAFTER = "mmdec-daspeech", "mmdec-drafter"
# arguments that AutoModel passes and that have no meaning for mmdec's folders; they are ignored
_PASSED = ("config", "trust_remote_code", "adapter_kwargs", "code_revision", "_from_auto", "_commit_hash")
_UPLOADING = ("private", "token", "revision", "commit_message")
_FETCHING = ("revision", "token", "cache_dir", "force_download", "local_files_only")


class DASpeechModelConfig(PreTrainedConfig):
    """The configuration of a translator. `settings` holds the content of mmdec's config.json, with the keys
    `architecture`, `vocoder` and `decoding`."""

    model_type = DASPEECH

    def __init__(self, **settings: Any) -> None:  # needed: transformers makes subclasses without `__init__` dataclasses
        self.settings = _own(settings)
        named: dict[str, Any] = {"name_or_path": str(settings.get("name_or_path") or "")}
        super().__init__(**named)


class DrafterModelConfig(PreTrainedConfig):
    """The configuration of a draft network. `settings` holds the content of mmdec's config.json; the value of its key
    "system" is the drafter's name in `mmdec.drafters.registry`."""

    model_type = DRAFTER

    def __init__(self, **settings: Any) -> None:
        self.settings = _own(settings)
        named: dict[str, Any] = {"name_or_path": str(settings.get("name_or_path") or "")}
        super().__init__(**named)


def _own(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that belong in mmdec's config.json: all except those that transformers adds in `to_dict`."""
    inner = settings.get("settings")
    if isinstance(inner, dict):
        return dict(inner)
    added = {"name_or_path", "model_type", "transformers_version", "dtype", "torch_dtype"}
    return {name: value for name, value in settings.items() if name not in added and not name.startswith("_")}


AutoConfig.register(DASPEECH, DASpeechModelConfig, exist_ok=True)
AutoConfig.register(DRAFTER, DrafterModelConfig, exist_ok=True)


class _Model(PreTrainedModel):
    """Base class of models that can be saved to a folder and uploaded to the hub."""

    def save_pretrained(  # type: ignore[override] # fewer options
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> None:
        """Write the model's folder. If writing fails, an existing folder stays as it was.

        push_to_hub: whether to upload the folder, too. repo_id: "owner/name". options: private, token, revision,
            commit_message, for the upload. Raises: InputError for other options, before anything is written.
        """
        uploading = _uploading(options)
        self.write(Path(save_directory))
        if push_to_hub:
            push_folder(Path(save_directory), repo_id or Path(save_directory).name, **uploading)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:  # type: ignore[override] # fewer options
        """Upload the model's folder to a repository of the hub. Returns: the address of the commit.

        repo_id: "owner/name". options: private, token, revision, commit_message. Raises: InputError for other options.
        """
        uploading = _uploading(options)
        with tempfile.TemporaryDirectory(prefix="mmdec-push-") as folder:
            self.write(Path(folder) / "model")
            return push_folder(Path(folder) / "model", repo_id, **uploading)

    def write(self, folder: Path) -> None:
        """Write the model's files in mmdec's format."""
        raise NotImplementedError

    def _init_weights(self, module: Any) -> None:
        """Do nothing, because all weights are loaded from files."""


class DASpeechModel(_Model):
    """A translator: `network` (features to graph) and `vocoder`. `parts` holds both networks, the tables and, for some
    models, a voice network."""

    config_class = DASpeechModelConfig
    base_model_prefix = "network"
    main_input_name = "features"

    def __init__(self, config: DASpeechModelConfig, parts: Any = None) -> None:
        super().__init__(config)
        if parts is None:
            raise InputError("`DASpeechModel` must be made with `from_pretrained`. Its recipes train a new one.")
        self.parts = parts
        self.network, self.vocoder = parts.model, parts.vocoder

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *_: Any, **options: Any) -> Self:
        """Load a translator by shipped name, directory or hub id.

        options: dtype, revision, token, cache_dir, force_download, local_files_only. Raises: InputError for other
            options.
        """
        from mmdec.hub.daspeech import complete, read_parts

        dtype, fetching = _options(options)
        name = pretrained_model_name_or_path
        folder = complete(find(name, fetching=fetching), os.fspath(name))
        model = cls(DASpeechModelConfig.from_pretrained(folder), read_parts(folder, torch.device("cpu")))
        return cast(Any, model).to(dtype).eval()

    def forward(self, features: Tensor, *lengths: Tensor) -> Any:
        """Predict the graphs of a batch. Returns: a `Lattice`.

        A DASpeech takes filterbank features (B, N, 80) and lengths (B,) in frames. A `HeardTranslator` (which
        translates word pieces) takes the three outputs of its method `features`.
        """
        source = self.network.source(features, *lengths)
        return self.network.lattice(source.states, source.lengths, source.sizes)

    def write(self, folder: Path) -> None:
        from mmdec.hub.daspeech import save_parts

        save_parts(folder, self.parts)


class DrafterModel(_Model):
    """A drafter's network. The target, with its embedding and LM head, is not part of it."""

    config_class = DrafterModelConfig
    base_model_prefix = "network"

    def __init__(self, config: DrafterModelConfig, network: Any = None, *beside: Any) -> None:
        """network: the draft network. beside: further parts of the folder: for Medusa heads their measured acceptance
        rates; for a CTC head its vocabulary, the model's token ids, and the n-gram or None."""
        super().__init__(config)
        if network is None:
            raise InputError("`DrafterModel` must be made with `from_pretrained`. Its recipes train a new one.")
        self.network, self.beside = network, beside

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *_: Any, **options: Any) -> Self:
        """Load a drafter's network by directory, hub id, or, for a shipped one, "<model>/<drafter>" such as
        "vlm-scenes/eagle".

        options: dtype, revision, token, cache_dir, force_download, local_files_only.
        """
        from mmdec.hub.ctc import SYSTEM as CTC
        from mmdec.hub.ctc import read_ctc
        from mmdec.hub.drafters import read_network
        from mmdec.hub.medusa import SYSTEM as MEDUSA
        from mmdec.hub.medusa import read_heads

        dtype, fetching = _options(options)
        folder = drafter_path(pretrained_model_name_or_path, fetching)
        config = DrafterModelConfig.from_pretrained(folder)
        readers: dict[str, Any] = {MEDUSA: read_heads, CTC: read_ctc}
        read = readers.get(str(config.settings.get("system")), lambda folder: (read_network(folder),))
        return cast(Any, cls(config, *read(folder))).to(dtype).eval()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the forward of the draft network with the same arguments."""
        return self.network(*inputs, **options)

    def write(self, folder: Path) -> None:
        from mmdec.hub.ctc import save_ctc
        from mmdec.hub.drafters import save_network
        from mmdec.hub.medusa import save_heads
        from mmdec.nn.ctc_head import CtcHead
        from mmdec.nn.medusa import MedusaHeads

        if isinstance(self.network, MedusaHeads):
            save_heads(folder, self.network, ranks=self.beside[0])
        elif isinstance(self.network, CtcHead):
            save_ctc(folder, self.network, *self.beside)
        else:
            save_network(self.network, folder)


def _options(options: dict[str, Any]) -> tuple[torch.dtype, dict[str, Any]]:
    """Divide the options of `from_pretrained` into the dtype and the options for downloading. Raises InputError for an
    option that would have no effect."""
    dtype = options.pop("dtype", None) or options.pop("torch_dtype", None) or torch.float32
    options.pop("torch_dtype", None)
    dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"`dtype` must be one of torch's floating types, but is {dtype!r:.60}. Try torch.float32.")
    if options.get("trust_remote_code"):
        raise InputError("`trust_remote_code` must be left out: mmdec's folders hold no code, and none is run.")
    fetching = {name: options.pop(name) for name in _FETCHING if options.get(name)}
    unknown = sorted(name for name, value in options.items() if name not in (*_PASSED, *_FETCHING) and value)
    if unknown:
        raise InputError(f"`{unknown[0]}` must be left out: mmdec's own models have no such option.")
    return dtype, fetching


def _uploading(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for `push_folder`, without those that are None. Raises InputError for any other option."""
    unknown = sorted(name for name in options if name not in _UPLOADING)
    if unknown:
        raise InputError(f"`{unknown[0]}` must be left out: the options are {', '.join(_UPLOADING)}.")
    return {name: value for name, value in options.items() if value is not None}


AutoModel.register(DASpeechModelConfig, DASpeechModel, exist_ok=True)
AutoModel.register(DrafterModelConfig, DrafterModel, exist_ok=True)
