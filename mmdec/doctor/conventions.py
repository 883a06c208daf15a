"""The settings with which a drafter's network may be run wrongly, and the variants that `examine.py` tries.

A setting (in the names: a convention) is a choice in how the network is run, such as the target's layers that it reads.
The config.json and the tensors' names in a checkpoint folder state these choices, but engines interpret them
differently, and guess what is not stated. Each `Variant` runs the network with one setting changed, and
says which change of the folder has the same effect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.checks.weights import read_settings
from mmdec.doctor.answers import NetworkRun
from mmdec.drafters.eagle.eagle3 import default_layers
from mmdec.drafters.networks.checkpoint import SCALED_ROPE
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.hub.checkpoint import read_tensors, tensor_names

DEFAULT_ROPE_BASE = 10000.0  # base of rotary positions if a config names none
LINEAR_ROPE_FACTORS = (2.0, 4.0)  # factors to try for linearly scaled rotary positions
# names of the formats of checkpoint folders
OWN_FORMAT, FLAT_FORMAT, SPECULATORS_FORMAT = "mmdec's own", "published, flat", "speculators'"
CONVERT_FIRST = "Convert the folder with `mmdec convert drafter`. "


@dataclass(frozen=True)
class Remedy:
    """How to correct a checkpoint folder.

    Args:
        config: Dotted key of config.json -> its new value.
        text: What else to do.
    """

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text: str = ""

    def __str__(self) -> str:
        settings = ", ".join(f"`{name}` to {json.dumps(value)}" for name, value in self.config.items())
        return " ".join(filter(None, (f"In config.json set {settings}." if settings else "", self.text)))


@dataclass(frozen=True)
class Variant:
    """A way to run a draft network that differs from the present way in one setting."""

    convention: str  # name of the setting that differs
    now: str  # the setting's present value, in words
    tried: str  # the value that the variant tries, in words
    run: NetworkRun  # runs the network with the value that is tried
    remedy: Remedy  # how to change the checkpoint folder, so that the network is always run like this
    depth: int = 1  # the first drafted token, counted from 1, on which this setting has an effect
    tries: int = 1  # among how many values a search has found this one; 1: it was not searched for


@dataclass(frozen=True)
class CheckpointFolder:
    """The facts about a drafter's checkpoint folder on which remedies depend."""

    path: Path
    described: Mapping[str, Any]  # config.json
    names: frozenset[str]  # names of its tensors

    @classmethod
    def read(cls, path: Path) -> CheckpointFolder:
        """Read config.json and the tensors' names of a drafter's folder.

        Raises:
            InputError: For a damaged folder.
        """
        return cls(path, read_settings(path / "config.json", "drafter"), tensor_names(path, "drafter"))

    @property
    def layout(self) -> str:
        """The format of the checkpoint folder: mmdec's, speculators', or the flat one of other trainers."""
        if "system" in self.described:
            return OWN_FORMAT
        return SPECULATORS_FORMAT if "speculators_model_type" in self.described else FLAT_FORMAT

    def set(self, values: Mapping[str, Any], published: Mapping[str, Any] | None) -> Remedy:
        """Make the correction of a checkpoint folder that sets fields of its config.json.

        Args:
            values: Dotted key -> value, in mmdec's format.
            published: The same fields in published formats; None: published formats have no such key.
        """
        if self.layout == OWN_FORMAT:
            return Remedy(values)
        if published is not None:
            return Remedy(published)
        fields = ", ".join(f"`{name}` to {json.dumps(value)}" for name, value in values.items())
        return Remedy(text=f"{CONVERT_FIRST}In the new folder's config.json set {fields}.")

    def key(self, name: str) -> str:
        """Return the dotted key of a setting of the decoder layer in a published config, which may be nested."""
        for inner in ("transformer_layer_config", "text_config"):
            if isinstance(self.described.get(inner), dict):
                return f"{inner}.{name}"
        return name

    def value(self, key: str) -> Any:
        """Return the value at a dotted key of config.json, such as "text_config.rope_theta"; None if there is none."""
        value: Any = self.described
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def rope(self) -> str:
        """Return the dotted key of the settings of rotary positions in config.json."""
        key = self.key("rope_parameters")
        return key if self.value(key) else self.key("rope_scaling")

    def base(self) -> str:
        """Return the dotted key of the base of rotary positions in config.json."""
        inner = f"{self.rope()}.rope_theta"
        return inner if self.value(inner) else self.key("rope_theta")

    def tensor(self, names: tuple[str, ...]) -> Tensor | None:
        """Read the first of these tensors that the folder holds, in float32; None if it holds none."""
        stored = next((name for name in names if name in self.names), None)
        return None if stored is None else read_tensors(self.path, "drafter")[stored].float()


def reconfigure(network: DraftNetwork, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> DraftNetwork:
    """Build a network that shares the weights of `network`, but has another configuration.

    Args:
        tensors: Weights, by name, that replace the network's, or that only the new configuration has.
        changes: Fields of the configuration that differ.
    """
    with torch.device("meta"):
        changed = type(network)(replace(network.config, **changes))
    state = {**network.state_dict(), **(tensors or {})}
    changed.load_state_dict({name: state[name] for name in changed.state_dict()}, assign=True)
    return changed.eval()


def variants(run: NetworkRun, folder: CheckpointFolder, model: PreTrainedModel, pictures: bool) -> Iterator[Variant]:
    """Yield all variants of how the network is run, each with one setting changed.

    Args:
        run: How the network is run now.
        model: The target.
        pictures: Whether any prompt has pictures.
    """
    target: Any = model.config.get_text_config(decoder=True)
    yield from _layers(run, folder, target.num_hidden_layers)
    yield from _switches(run, folder)
    yield from _norms(run, folder)
    yield from _rotations(run, folder, target)
    yield from _ends(run, folder)
    yield from _columns(run, folder, target, pictures)


def layer_rules(run: NetworkRun, depth: int) -> dict[tuple[int, ...], str]:
    """Return other choices of the target's layers to read: layers -> a description in words.

    The network may read the hidden states of all layers one higher, of all layers one lower, or of EAGLE-3's default
    layers. The layers that are read now are left out.

    Args:
        depth: The target's number of layers.
    """
    layers = run.layers
    rules = {tuple(layer + step for layer in layers): name for step, name in ((1, "one higher"), (-1, "one lower"))}
    if len(layers) == 3:
        rules.setdefault(default_layers(depth), "the default")
    return {ids: name for ids, name in rules.items() if ids != layers and all(0 <= layer < depth for layer in ids)}


def other_layers(
    run: NetworkRun,
    folder: CheckpointFolder,
    ids: tuple[int, ...],
    name: str,
    convention: str = "layer ids",
    tries: int = 1,
) -> Variant:
    """Make the variant in which the network reads the hidden states of other layers of the target.

    Args:
        ids: Indices of these layers.
        name: Description of the choice in words.
        tries: Among how many choices a search has found it.
    """
    key = run.network.conventions().layer_ids
    published = None if key is None else {key: [layer + 1 for layer in ids]}
    remedy = folder.set({"layers": list(ids)}, published if -1 not in ids else None)
    now = f"outputs of {_layer_names(run.layers)}"
    return Variant(
        convention, now, f"{name}: {_layer_names(ids)}", _reconfigure_run(run, layers=ids), remedy, tries=tries
    )


def _layers(run: NetworkRun, folder: CheckpointFolder, depth: int) -> Iterator[Variant]:
    """Yield variants that read other layers, or the last layer on the other side of the final norm."""
    layers, last = run.layers, depth - 1
    if min(layers) >= 0:
        for ids, name in layer_rules(run, depth).items():
            yield other_layers(run, folder, ids, name)
    if -1 in layers:
        for replaced, name in ((last, "features before it"), (last - 1, "the layer below")):
            if replaced >= 0:
                ids = tuple(replaced if layer == -1 else layer for layer in layers)
                yield other_layers(run, folder, ids, name, "final norm")
    elif last in layers:
        normed = tuple(-1 if layer == last else layer for layer in layers)
        yield other_layers(run, folder, normed, "the last features after it", "final norm")


def _switches(run: NetworkRun, folder: CheckpointFolder) -> Iterator[Variant]:
    """Yield variants of switches that change no weights."""
    for switch in run.network.conventions().switches:
        now = bool(getattr(run.network.config, switch.field))
        changes = {switch.field: not now}
        yield Variant(
            switch.convention,
            switch.words[now],
            switch.words[not now],
            _reconfigure_run(run, **changes),
            folder.set(changes, changes),
            depth=switch.depth,
        )


def _norms(run: NetworkRun, folder: CheckpointFolder) -> Iterator[Variant]:
    """Yield variants that leave out a norm of the folder, or add a norm that it lacks, with all weights 1."""
    network = run.network
    norms = network.conventions().norms
    normed = any(getattr(network.config, norm.field) for norm in norms)
    for norm in norms:
        names = ", ".join(f"`{name}`" for name in norm.tensors)
        named = norm.published or folder.layout == OWN_FORMAT  # whether config.json has a key for this norm
        if getattr(network.config, norm.field):
            remedy = Remedy({norm.field: False} if named else {}, f"Leave {names} out of the folder's tensors.")
            yield Variant(
                "norms", f"norm of {norm.where}", "none", _reconfigure_run(run, **{norm.field: False}), remedy
            )
        elif not normed:
            weight = next(network.parameters())
            ones = {
                name: torch.ones(count, dtype=weight.dtype, device=weight.device)
                for name, count in norm.tensors.items()
            }
            changed = replace(run, network=reconfigure(network, ones, **{norm.field: True}))
            text = f"Put {names} into the folder, as trained; weights of one were tried."
            remedy = Remedy({norm.field: True} if named else {}, text)
            yield Variant("norms", f"no norm of {norm.where}", "a norm with weights of one", changed, remedy)


def _rotations(run: NetworkRun, folder: CheckpointFolder, target: Any) -> Iterator[Variant]:
    """Yield variants with another base or scaling of rotary positions (RoPE)."""
    config: Any = run.network.config
    rope = getattr(target, "rope_parameters", None) or {}
    base = rope.get("rope_theta")
    for theta, name in ((DEFAULT_ROPE_BASE, "the usual"), (base, "the model's")):
        if isinstance(theta, int | float) and theta > 0 and theta != config.rope_theta:
            yield other_base(run, folder, float(theta), name)
        if theta == base:
            break  # the model's base is `DEFAULT_ROPE_BASE`, which was tried in the step before
    if not run.network.conventions().rope_scaling:
        return
    settings_now: dict[str, Any] = dict(folder.value(folder.rope()) or {})
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", *MROPE_KEYS)}
    if config.rope_scaling is not None:
        rope_fields = {name: settings_now[name] for name in (*MROPE_KEYS, "rope_theta") if name in settings_now}
        published = {folder.rope(): {**rope_fields, "rope_type": "default"} if rope_fields else None}
        remedy = folder.set({"rope_scaling": None}, published)
        yield Variant("rope scaling", "as its config says", "none", _reconfigure_run(run, rope_scaling=None), remedy)
        return
    rope_fields = {name: value for name, value in settings_now.items() if name not in ("type", "rope_type")}
    scalings: dict[str, dict[str, Any]] = {"the model's": scaling} if scaling.get("rope_type") in SCALED_ROPE else {}
    scalings |= {
        f"linear, factor {factor:g}": {"rope_type": "linear", "factor": factor} for factor in LINEAR_ROPE_FACTORS
    }
    for name, settings in scalings.items():
        remedy = folder.set({"rope_scaling": settings}, {folder.rope(): {**rope_fields, **settings}})
        yield Variant("rope scaling", "none", name, _reconfigure_run(run, rope_scaling=settings), remedy)


def other_base(run: NetworkRun, folder: CheckpointFolder, theta: float, name: str, tries: int = 1) -> Variant:
    """Make the variant with another base of rotary positions (RoPE).

    Args:
        theta: The base.
        name: Where the base is from.
        tries: Among how many choices a search has found it.
    """
    remedy = folder.set({"rope_theta": theta}, {folder.base(): theta})
    now, changed = f"{run.network.config.rope_theta:g}", _reconfigure_run(run, rope_theta=theta)
    return Variant("rope base", now, f"{name}, {theta:g}", changed, remedy, tries=tries)


MROPE_KEYS = ("mrope_section", "mrope_interleaved")  # settings of rotary positions with three axes


def _ends(run: NetworkRun, folder: CheckpointFolder) -> Iterator[Variant]:
    """Yield variants with another embedding, scale of the embedding, LM head or `d2t`.

    `d2t` converts draft tokens to the target's tokens.
    """
    network, config = run.network, run.network.config
    scale = math.sqrt(config.hidden_size)
    columns = network.conventions().embedding_columns
    for factor, name in ((scale, f"times {scale:.4g}"), (1 / scale, f"divided by {scale:.4g}")):
        if columns is None:
            scaled = replace(run, scale=run.scale * factor)
            weights = "`embed_tokens.weight`, the folder's or else the model's,"
        else:
            weights = f"the first {config.hidden_size} columns of `{columns}`"
            weight = network.get_parameter(columns).clone()
            weight[:, : config.hidden_size] *= factor
            scaled = replace(run, network=reconfigure(network, {columns: weight}))
        remedy = Remedy(text=f"In the folder's tensors, multiply {weights} by {factor:.6g}.")
        yield Variant("embedding scale", "as the embedding gives it", name, scaled, remedy)
    if network.own_head is not None:
        yield from _own_ends(run)
        return
    for convention, names, end in (
        ("LM head", ("lm_head.weight", "model.lm_head.weight"), run.output),
        ("embedding", ("embed_tokens.weight", "model.embed_tokens.weight"), run.embedding),
    ):
        now = cast(Tensor, end.weight)
        stored = None if folder.layout == OWN_FORMAT else folder.tensor(names)
        if stored is None or stored.shape != now.shape or torch.equal(stored.to(now), now):
            continue
        remedy = Remedy(text="The drafter was trained for other weights than this model's: draft for that model.")
        if convention == "LM head":
            changed = replace(run, output=_linear(stored.to(now)))
        else:
            changed = replace(run, embedding=nn.Embedding.from_pretrained(stored.to(now)))
        yield Variant(convention, "the model's", "the folder's", changed, remedy)


def _own_ends(run: NetworkRun) -> Iterator[Variant]:
    """Yield variants of a network with an LM head of its own: another embedding, LM head or `d2t`.

    `d2t` converts draft tokens to the target's tokens.
    """
    network, config, output = run.network, run.network.config, run.output
    if network.own_embedding is not None and config.hidden_size == config.target_size:
        shared = replace(run, network=reconfigure(network, own_embedding=False))
        remedy = Remedy(text="Leave `embed_tokens.weight` out of the folder's tensors.")
        yield Variant("embedding", "the folder's", "the model's", shared, remedy)
    table = network.draft_vocabulary.offsets
    ids = network.draft_vocabulary.all_token_ids(output.weight.device)
    legal = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if config.hidden_size == config.target_size and legal:
        tied = replace(run, network=reconfigure(network, {"lm_head.weight": output.weight[ids].clone()}))
        rows = "the rows of the drafted tokens in the model's LM head" if table is not None else "the model's LM head"
        remedy = Remedy(text=f"Replace `lm_head.weight` by {rows}.")
        yield Variant("LM head", "its own", "tied to the model's", tied, remedy)
    if table is not None:
        own = torch.arange(len(table), device=table.device)
        if int(table.min()) >= 0 and int(table.max()) < config.vocab_size and len(table.unique()) == len(table):
            read = replace(run, network=reconfigure(network, {"d2t": table - own}))
            remedy = Remedy(text="`d2t` holds tokens: subtract `torch.arange(len(d2t))` from it, or add `t2d`.")
            yield Variant("d2t", "offsets", "tokens", read, remedy)


def _columns(run: NetworkRun, folder: CheckpointFolder, target: Any, pictures: bool) -> Iterator[Variant]:
    """Yield variants in which the network reads other things at a position.

    It reads the embedding of another token, the features of another token, or other embeddings for pictures.
    """
    text = (
        "No setting corrects this. Train again: column t must read the embedding of token t + 1 and the features of "
        "token t."
    )
    for late, name in (
        ("tokens", "token t and the features of token t"),
        ("features", "token t + 1, features of t - 1"),
    ):
        shifted = replace(run, late=late)
        yield Variant("column shift", "token t + 1, features of token t", name, shifted, Remedy(text=text))
    if not pictures:
        return
    config: Any = run.network.config
    conventions = run.network.conventions()
    for choice in conventions.pictures:
        present = getattr(config, choice.field)
        for value in choice.values:
            if value != present:
                changes: dict[str, Any] = {choice.field: value}
                yield Variant(
                    choice.convention, present, value, _reconfigure_run(run, **changes), folder.set(changes, None)
                )
    if not conventions.positions:
        return
    rope = getattr(target, "rope_parameters", None) or {}
    sections = tuple(config.mrope_section or rope.get("mrope_section") or ())
    if not rope.get("mrope_section"):
        return  # no M-RoPE: the model's positions have one axis
    settings_now: dict[str, Any] = dict(folder.value(folder.rope()) or {})
    plain = {name: value for name, value in settings_now.items() if name not in MROPE_KEYS}
    fields: dict[str, Any] = {"mrope_section": list(sections)}
    fields["mrope_interleaved"] = bool(config.mrope_interleaved or rope.get("mrope_interleaved"))
    names = {"text": "counted like text", "temporal": "the first axis", "axes": "three axes"}
    for kind in conventions.positions:
        if kind == config.positions or (kind == "axes" and 2 * sum(sections) != config.head_dim):
            continue
        changes = {"positions": kind, **(fields if kind == "axes" else {})}
        published: dict[str, Any] | None = None
        if kind == "axes":
            published = {folder.rope(): {"rope_type": "default", **plain, **fields}}
        elif kind == "temporal":
            published = {folder.rope(): {**plain, "rope_type": "default"} if plain else None}
        remedy = folder.set(changes, published)
        yield Variant("positions", names[config.positions], names[kind], _reconfigure_run(run, **changes), remedy)


def _reconfigure_run(run: NetworkRun, **changes: Any) -> NetworkRun:
    return replace(run, network=reconfigure(run.network, **changes))


def _linear(weight: Tensor) -> nn.Linear:
    """Make an LM head with these weights (vocabulary, H)."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def _layer_names(layers: tuple[int, ...]) -> str:
    return ", ".join("the final norm" if layer == -1 else str(layer) for layer in layers)
