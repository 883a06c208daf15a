"""Code that all targets for transformers' models share.

It has the methods that `generate` needs, the model's name and folder, and hooks that record hidden states.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from mmdec.checks.fingerprint import fingerprint
from mmdec.errors import InputError
from mmdec.types import Needs, Target

GenerateOutput = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
N = TypeVar("N", bound=nn.Module)
TREE_MASK_ATTENTION = ("sdpa", "eager")  # attention implementations of encoder-decoders that accept tree masks
# A module of transformers. Its hooks, which record hidden states, stay on a model, but do nothing in later passes.
RECORDERS = "transformers.utils.output_capturing"
# layer -> states, filled during the current pass; None if nothing is recorded
_recorded_states: ContextVar[dict[int, Tensor] | None] = ContextVar("recorded", default=None)
_installing = threading.Lock()
_soft_inputs: ContextVar[Tensor | None] = ContextVar("soft", default=None)  # `Draft.soft` of the current pass
FIRST_LAYER_INPUTS = -2  # in a list of layers to record: stands for the first layer's inputs


class HfTarget(Target, ABC):
    """The base class of targets for models of transformers.

    It adds what `model.generate` needs to the methods of `Target`. Defaults are those of a language model's target.
    """

    # whether `model.generate` runs the decoding loop exactly once; `mmdec.generate` and `stream` require this
    decodes_once: ClassVar[bool] = True
    reads_encoder: ClassVar[bool] = False  # whether the model's decoder attends to the states of an encoder
    # whether the method `encode` can compute the states of the encoder from sound features
    encodes_sound: ClassVar[bool] = False
    reads_images: ClassVar[bool] = False  # whether the model reads images, at placeholders among the token ids
    # names of options of a generation config that ask for outputs which mmdec cannot give
    refused_outputs: ClassVar[tuple[str, ...]] = ()
    # Classes of logits processors that read the whole batch, but leave the logits as they are.
    batch_processors: ClassVar[tuple[type, ...]] = ()
    # whether the model's attention takes a token's cache index as its position, so that sibling nodes cannot share one
    nodes_take_positions: bool = False
    reads_soft_nodes: bool = False  # whether drafts may have soft nodes
    needs_chains: bool = False  # whether drafts must be chains, because the model has recurrent or convolutional states
    positions: int | None  # the model's maximum number of positions, or None if unlimited
    model: Any

    @staticmethod
    @abstractmethod
    def supports(model: PreTrainedModel) -> bool:
        """Return whether this class scores drafts for the model, by its class and configuration."""

    @property
    def name(self) -> str:
        """A name made of the model's folder or Hugging Face id, and a hash of its weights."""
        return model_name(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def encode(self, input_features: Tensor) -> Tensor | None:
        """Return the encoder's states (B, S, H) of input features (B, mels, T); None if the model reads none."""
        return None

    def split_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the caller's inputs.

        Returns:
            The inputs for `model.generate`, which prepares them, and the inputs that go to `prefill` directly (by
            default none).
        """
        return dict(inputs), {}

    @abstractmethod
    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of `prefill`.

        Args:
            ids: (B, P).
            inputs: The other inputs, prepared by `model.generate`.
        """

    def fallback_reasons(self, config: GenerationConfig, inputs: Mapping[str, Any]) -> list[str]:
        """Return why only transformers' own loop can decode this call.

        Args:
            config: The call's configuration.
            inputs: Prepared by `model.generate`.

        Returns:
            Sentences without a full stop; empty if mmdec's loop can decode it.
        """
        return []

    @abstractmethod
    def must_fill_cache(self, inputs: Mapping[str, Any], config: GenerationConfig) -> bool:
        """Return whether `fill_cache` must be called at the end, because the caller may read the cache."""

    @abstractmethod
    def fill_cache(self, inputs: Mapping[str, Any], sequences: Tensor) -> None:
        """Fill the caller's cache as `model.generate` would have filled it.

        Args:
            sequences: (B, L), finished.
        """

    @abstractmethod
    def output(
        self,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: Sequence[int],
        config: GenerationConfig,
        scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None,
    ) -> GenerateOutput:
        """Make transformers' output object.

        Args:
            sequences: (B, L).
            lengths: Each batch row's number of new tokens.
            scores, logits: (B, V) for each new token of the longest row; None: not recorded.
        """


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks or a replaced `forward`.

    Hooks by which mmdec and transformers record hidden states do not count.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    inert = (RECORDERS, __name__)
    return "forward" in vars(module) or any(getattr(hook, "__module__", "") not in inert for hook in hooks)


def plain_linear(module: nn.Module) -> bool:
    """Return whether the module is torch's own linear layer without hooks, which another implementation may replace."""
    return type(module) is nn.Linear and not has_hooks(module)


@final
class LayerInput:
    """A hook that records the input of a decoder layer, but only while `record_states` is active."""

    def __init__(self, layer: int) -> None:
        self.layer = layer  # key of the recorded states: index of the previous layer, whose output they are

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = _recorded_states.get()
        if states is not None:
            states[self.layer] = args[0] if args else kwargs["hidden_states"]


@final
class LayerOutput:
    """A hook that records the last decoder layer's output, before the final norm, while `record_states` is active."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states = _recorded_states.get()
        if states is not None:
            states[self.layer] = output[0] if isinstance(output, tuple) else output


@final
class SoftInputs:
    """A hook on the input embedding that puts in the inputs of soft nodes while `soft_inputs` is active."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        soft = _soft_inputs.get()
        if soft is None:
            return None
        return torch.where(soft.any(-1, keepdim=True), soft.to(output.dtype), output)


@contextmanager
def soft_inputs(model: PreTrainedModel, soft: Tensor | None) -> Generator[None]:
    """In this context, the model reads `soft` (B, N, H) instead of its embeddings, wherever it is not 0.

    The hook stays on the model. It acts only in the thread that entered the context.
    """
    if soft is None:
        yield
        return
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[assignment] # not typed by transformers
    with _installing:
        if not any(isinstance(hook, SoftInputs) for hook in embedding._forward_hooks.values()):
            embedding.register_forward_hook(SoftInputs())
    token = _soft_inputs.set(soft)
    try:
        yield
    finally:
        _soft_inputs.reset(token)


@contextmanager
def record_states(decoder: nn.Module, count: int, layers: Sequence[int]) -> Generator[Mapping[int, Tensor]]:
    """In this context, record the hidden states (residual stream) after some layers of a pass.

    transformers' `hidden_states` differ: those of the last layer have passed the final norm, and those of Qwen3-VL's
    first layers lack what DeepStack adds. The hooks stay on the model. They record only in the thread that entered the
    context.

    Args:
        decoder: The module that contains the layers.
        count: The decoder's number of layers.
        layers: Indices to record, from 0, or `FIRST_LAYER_INPUTS`.

    Yields:
        Layer -> (B, N, H).

    Raises:
        InputError: If the list of the decoder's layers cannot be found.
    """
    if not layers:
        yield {}
        return
    stack = next((part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == count), None)
    if stack is None:
        raise InputError(
            f"`model` must have its {count} decoder layers in one list for a drafter that reads them, but "
            f"{type(decoder).__name__} does not. Use another drafter."
        )
    with _installing:
        for layer in layers:
            _install(stack, layer)
    states: dict[int, Tensor] = {}
    token = _recorded_states.set(states)
    try:
        yield states
    finally:
        _recorded_states.reset(token)


def _install(stack: nn.ModuleList, layer: int) -> None:
    following = 0 if layer == FIRST_LAYER_INPUTS else layer + 1
    if following == len(stack):
        if not any(isinstance(hook, LayerOutput) for hook in stack[layer]._forward_hooks.values()):
            stack[layer].register_forward_hook(LayerOutput(layer))
    elif not any(isinstance(hook, LayerInput) for hook in stack[following]._forward_pre_hooks.values()):
        stack[following].register_forward_pre_hook(LayerInput(layer), with_kwargs=True)


def source_of(model: PreTrainedModel) -> str:
    """Return the folder or Hugging Face id given to `from_pretrained`; "" for a model made from a configuration."""
    return str(model.config._name_or_path or "")


def source_folder(model: PreTrainedModel) -> Path | None:
    """Return the folder that the model was loaded from; None if it was not loaded from a folder."""
    source = source_of(model)
    return Path(source) if source and Path(source).is_dir() else None


def model_name(model: PreTrainedModel) -> str:
    """Return a name: the last part of the model's folder or Hugging Face id, or its class, and its weights' hash."""
    return f"{Path(source_of(model)).name or type(model).__name__}-{fingerprint(model)}"


def check_layers(needs: Needs, layers: int) -> None:
    """Raise InputError if a drafter reads a layer that the model does not have.

    Args:
        layers: Number of the model's layers.
    """
    wrong = [layer for layer in needs.layers if not -1 <= layer < layers]
    if wrong:
        raise InputError(
            f"`layers` must be from 0 to {layers - 1}, or -1 for the last layer after its norm, but holds {wrong[0]}. "
            "Use a drafter made for this model."
        )


def check_attention(config: Any) -> None:
    """Raise InputError if a decoder's attention implementation cannot take tree masks."""
    attention = config._attn_implementation
    if attention not in TREE_MASK_ATTENTION:
        raise InputError(
            f"`attn_implementation` must be one of {', '.join(TREE_MASK_ATTENTION)}, but is {attention}, "
            'which cannot mask a tree. Call `model.set_attn_implementation("sdpa")`.'
        )


def shallow_copy(module: N) -> N:
    """Copy a module. The copy shares parameters, buffers and submodules, but has its own attributes and hooks."""
    same = object.__new__(type(module))
    same.__dict__ = dict(module.__dict__)
    same.__dict__["_modules"] = dict(module._modules)
    for name in HOOK_TABLES:
        same.__dict__[name] = OrderedDict(module.__dict__[name])
    return same


def copy_modules(module: N, change: Callable[[nn.Module, Any], None]) -> N:
    """Copy a module and all modules below it, as `shallow_copy` does.

    Args:
        change: Called with each module and its copy, whose attributes it may change.
    """
    same = shallow_copy(module)
    same._modules = {name: child and copy_modules(child, change) for name, child in module._modules.items()}
    change(module, same)
    return same


def output_states(
    decoded: Any, encoded: Mapping[str, Any], prompt: int, length: int, config: GenerationConfig
) -> dict[str, Any]:
    """Return the attentions and hidden states of `generate`'s output object, as far as `config` asks for them.

    Args:
        decoded: The decoder's output for `length` tokens; the first `prompt` of them are the prompt.
        encoded: The encoder's output.

    Returns:
        Field name -> value.
    """
    states: dict[str, Any] = {}
    if config.output_attentions:
        states["decoder_attentions"] = _steps(decoded.attentions, prompt, length, 2, square=True)
        states["cross_attentions"] = _steps(decoded.cross_attentions, prompt, length, 2)
        states["encoder_attentions"] = encoded.get("attentions")
    if config.output_hidden_states:
        states["decoder_hidden_states"] = _steps(decoded.hidden_states, prompt, length, 1)
        states["encoder_hidden_states"] = encoded.get("hidden_states")
    return states


def _steps(
    layers: tuple[Tensor, ...], prompt: int, length: int, axis: int, square: bool = False
) -> tuple[tuple[Tensor, ...], ...]:
    """Split each layer's tensor by decoding step, as `generate` returns it: the prompt, then one token for each step.

    Args:
        layers: One tensor for each layer, with `length` tokens along `axis`; may be (), because "sdpa" returns no
            attentions.
        square: Whether these are maps of self-attention; their keys are cut after the step's token.

    Returns:
        For each step, a tuple of one tensor for each layer.
    """
    cuts = [(0, prompt), *((step, step + 1) for step in range(prompt, length))]
    return tuple(
        tuple((layer[..., :end] if square else layer).narrow(axis, begin, end - begin) for layer in layers)
        for begin, end in cuts
    )
