"""Copies of a Whisper model for one `generate` call: the encoder encodes each window once, and the decoder can return
attention maps for word timestamps.

The copies share the model's weights. A call changes nothing that other threads see.

For the provisional text of a stream, the encoder reads only the sound and a margin of silence, instead of always 30 s.
This changes results, because the model was trained on windows of 30 s. The decoder needs some silence to end its text;
without silence, the decoder repeats itself. `is_runaway` recognises such texts.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.activations import GELUActivation
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperEncoderLayer

from mmdec.core.timing import Stopwatch
from mmdec.kernels.onednn import attention, is_usable, linear
from mmdec.targets.hf_target import HOOK_TABLES, has_hooks, plain_linear, shallow_copy
from mmdec.whisper.batcher import PassBatcher

FRAMES = 100  # mel frames per second of audio
CONTEXT_STEP_FRAMES = FRAMES  # the encoder reads multiples of this number of frames (1 s), so that few shapes occur
TOKENS_A_SECOND, TOKENS_MORE = 12, 24  # a text with more than 12 tokens a second, plus 24, cannot be speech
COMPRESSIBLE = 1.35  # maximum compression ratio of the token ids as bytes, Whisper's threshold; above it, text repeats
SOUND = "sound"  # attribute of the encoder's output that holds the features which the encoder has read

BLOCK = 64  # the number of mel frames that are computed is a multiple of this number, so that few shapes occur


def recording_features(extractor: WhisperFeatureExtractor, samples: Tensor, rate: int, long: bool) -> dict[str, Tensor]:
    """Compute the same features of a recording as transformers' extractor, bit for bit.

    Short recordings take a fifth of the extractor's time.

    Frames of the silence that fills a window are all alike: they are not computed, but copied from the last computed
    frame.

    Args:
        samples: (T,) of the recording, with `rate` samples a second.
        long: Keep the whole recording, instead of one window.

    Returns:
        input_features (1, mels, F) and attention_mask (1, F), by name.
    """
    call = partial(extractor, sampling_rate=rate, return_tensors="pt", return_attention_mask=True)
    if long:
        return dict(call(samples.numpy(), padding="longest", truncation=False))
    hop, window = extractor.hop_length, extractor.nb_max_frames
    # Number of frames to compute. The last of them contains only silence, as do all later frames of the window.
    computed = -(-(len(samples) + extractor.n_fft) // (hop * BLOCK)) * BLOCK
    if computed >= window or extractor.dither or type(extractor) is not WhisperFeatureExtractor:
        return dict(call(samples.numpy()))
    sound = pad(samples, (0, computed * hop - len(samples)))
    found = call(sound.numpy(), padding="longest", truncation=False)
    heard, mask = found["input_features"], found["attention_mask"]
    silence = heard[..., -1:].expand(*heard.shape[:-1], window - computed)
    real = torch.arange(window)[None] * hop < len(samples)
    return {"input_features": torch.cat([heard, silence], -1), "attention_mask": real.to(mask.dtype)}


def can_use_eager_copy(model: WhisperForConditionalGeneration) -> bool:
    """Return whether a copy of this model's decoder may use another attention implementation than the model itself.

    The copy may not if a module's `forward` was replaced, because the new function reads the settings of the original
    module.
    """
    return not any("forward" in vars(module) for module in model.model.decoder.modules())


def eager_copy(decoder: nn.Module) -> nn.Module:
    """Return a copy of a decoder that shares its weights and hooks, but computes attention by transformers' "eager"
    code, which returns attention maps."""
    config: Any = copy.copy(decoder.config)
    config._attn_implementation = "eager"

    def twin(module: nn.Module) -> nn.Module:
        same = shallow_copy(module)
        if "config" in vars(same):
            same.config = config
        same._modules = {name: child and twin(child) for name, child in module._modules.items()}
        return same

    return twin(decoder)


def with_caching_encoder(
    model: WhisperForConditionalGeneration,
    on_pass: Callable[[Tensor, float], None],
    own_config: bool = True,
    margin: float | None = None,
    together: PassBatcher | None = None,
) -> tuple[WhisperForConditionalGeneration, CachingEncoder]:
    """Make a copy of the model for one `generate` call, whose encoder stores the states of the last windows.

    `generate` encodes each window several times: for its text, to detect the language, to recognise silence, and at
    each fallback temperature. With the copy, the encoder runs once. The model itself is not changed, so other threads
    may use it meanwhile. Attentions of the encoder are not returned.

    Args:
        on_pass: Called each time with the features (B, mels, T) and the seconds of the encoder's pass; 0 if stored
            states were returned.
        own_config: Whether the copy gets a copy of the configuration, so that `generate` may set it to "eager"
            attention for word timestamps.
        margin: A single window is encoded only up to this many seconds after its sound; None: to its end.
        together: Computes the encoder's passes in another thread; None: they are computed in this thread.

    Returns:
        The copy, and the object that replaces its encoder's `forward`.
    """
    outer, inner, encoder = shallow_copy(model), shallow_copy(model.model), shallow_copy(model.model.encoder)
    for name in HOOK_TABLES:
        vars(encoder)[name] = OrderedDict()  # the copy gets no hooks: it calls the original encoder, which has them
    remembering = CachingEncoder(model.model.encoder, on_pass, margin, together)
    vars(encoder)["forward"] = remembering
    inner._modules["encoder"] = encoder
    outer._modules["model"] = inner
    if own_config:
        inner.config = copy.copy(model.config)
    return outer, remembering


@final
class CachingEncoder:
    """Replaces the `forward` of an encoder, and stores the features and states of the last windows.

    If all rows equal stored windows, it returns their states without running the encoder.
    """

    def __init__(
        self,
        encoder: nn.Module,
        on_pass: Callable[[Tensor, float], None],
        margin: float | None,
        together: PassBatcher | None = None,
    ) -> None:
        """Initialize.

        Args:
            on_pass: Called with features (B, mels, T) and seconds of each call.
            margin: A single window is encoded up to this many seconds after its sound; None: to its end.
            together: Computes passes in another thread; None: not used.
        """
        self._on_pass, self._together = on_pass, together
        own = not can_shorten(encoder)
        self._margin = None if own else margin
        self._encoder, self._quick = encoder, None if own else shallow_copy(encoder)  # the copy keeps the hooks
        if self._quick is not None:
            vars(self._quick)["forward"] = self._read
        self._last: Tensor | None = None  # features (B, mels, T) of the last windows
        self._states = torch.empty(0)  # (B, S, H), the encoder's states for `_last`
        self.sound = torch.empty(0)  # (b, mels, T), features of the last call

    def __call__(self, input_features: Tensor, attention_mask: Any = None, **options: Any) -> BaseModelOutput:
        rows, self.sound = self._rows(input_features), input_features
        if rows is None:
            stopwatch = Stopwatch(input_features.device)
            options |= {"output_attentions": False, "return_dict": True}
            encode = partial(self._encode, input_features, attention_mask, options)
            apart = input_features.device.type == "cpu"
            encoded = encode() if self._together is None else self._together.run_alone(encode, apart)
            self._last, self._states = input_features, cast(Tensor, encoded.last_hidden_state)
            self._on_pass(input_features, stopwatch.lap())
        else:
            self._on_pass(input_features, 0.0)
            whole = rows == list(range(len(self._states)))
            encoded = BaseModelOutput(last_hidden_state=self._states if whole else self._states[rows])
        setattr(encoded, SOUND, input_features)
        return encoded

    @property
    def seconds(self) -> float | None:
        """Return how many seconds of the last window were encoded; None if the whole window was."""
        if self._margin is None or self._last is None or 2 * self._states.shape[1] >= self._last.shape[-1]:
            return None
        return 2 * self._states.shape[1] / FRAMES

    def whole(self) -> BaseModelOutput:
        """Encode the last window to its end. Returns the window's states, which replace the stored states."""
        features, margin = self._last, self._margin
        assert features is not None
        self._last = self._margin = None
        try:
            return self(features)
        finally:
            self._margin = margin

    def _encode(self, features: Tensor, attention_mask: Any, options: dict[str, Any]) -> BaseModelOutput:
        if self._margin is not None and len(features) == 1:
            frames = context_frames(features, self._margin)
            if frames < features.shape[-1]:
                return BaseModelOutput(last_hidden_state=encode(self._encoder, features, frames))
        config: Any = self._encoder.config
        whole = features.shape[-1] == 2 * config.max_source_positions
        if self._quick is not None and whole and is_usable(features) and not options.get("output_hidden_states"):
            return self._quick(features, attention_mask=attention_mask, **options)
        return self._encoder(features, attention_mask=attention_mask, **options)

    def _read(self, input_features: Tensor, **_: Any) -> BaseModelOutput:
        states = encode(self._encoder, input_features, input_features.shape[-1])
        return BaseModelOutput(last_hidden_state=states)

    def _rows(self, features: Tensor) -> list[int] | None:
        """Return for each batch row of features (B, mels, T) the index of the equal stored row; None if any row is
        new."""
        if self._last is None or self._last.shape[1:] != features.shape[1:]:
            return None
        rows = list[int]()
        for index, row in enumerate(features):
            # compare a window with the stored one of the same index first, because it is most likely the same
            order = sorted(range(len(self._last)), key=lambda other: other != index)
            same = next((other for other in order if torch.equal(self._last[other], row)), None)
            if same is None:
                return None
            rows.append(same)
        return rows


def context_frames(features: Tensor, margin: float) -> int:
    """Return how many frames of a window to encode: up to `margin` seconds after its last sound, in whole seconds.

    Frames at the end that equal the last frame are padding or digital silence.

    Args:
        features: (1, mels, T).
    """
    sounds = (features != features[..., -1:]).any(1)[0].nonzero()[:, 0]
    heard = int(sounds[-1]) + 1 if len(sounds) else 0
    return min(math.ceil((heard + margin * FRAMES) / CONTEXT_STEP_FRAMES) * CONTEXT_STEP_FRAMES, features.shape[-1])


def encode(encoder: Any, features: Tensor, frames: int) -> Tensor:
    """Return the encoder's states (B, frames / 2, H) of the first `frames` frames of features (B, mels, T).

    transformers' layers are computed without the overhead of their `forward`; in float32 on a CPU, oneDNN computes
    them.
    """
    x = gelu(encoder.conv1(features[..., :frames]))
    x = gelu(encoder.conv2(x)).transpose(1, 2)
    x = x + encoder.embed_positions.weight[: x.shape[1]]
    for layer in encoder.layers:
        if _stock(layer):
            x = _through(layer, x)
        else:
            read = layer(x, None)
            x = read[0] if isinstance(read, tuple) else read  # some versions of transformers return a tuple
    return encoder.layer_norm(x)


def _stock(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' own, without hooks, and uses "sdpa" attention."""
    if type(layer) is not WhisperEncoderLayer or layer.training or has_hooks(layer):
        return False
    own: Any = layer.self_attn
    if type(own) is not WhisperAttention or has_hooks(own):
        return False
    settings: Any = own.config
    return settings._attn_implementation == "sdpa"


def _through(layer: Any, x: Tensor) -> Tensor:
    """Run one of transformers' own encoder layers over x (B, S, H)."""
    own, y = layer.self_attn, layer.self_attn_layer_norm(x)
    parts = (_linear(own.q_proj, y) * own.scaling, _linear(own.k_proj, y), _linear(own.v_proj, y))
    heads = (part.unflatten(2, (own.num_heads, -1)).transpose(1, 2) for part in parts)
    x = x + _linear(own.out_proj, attention(*heads).transpose(1, 2).flatten(2))
    y = layer.final_layer_norm(x)
    if type(layer.activation_fn) is GELUActivation and plain_linear(layer.fc1):
        y = linear(y, layer.fc1.weight, layer.fc1.bias, "gelu")
    else:
        y = layer.activation_fn(layer.fc1(y))
    return x + _linear(layer.fc2, y)


def _linear(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias) if plain_linear(module) else module(x)


def can_shorten(encoder: nn.Module) -> bool:
    """Return whether `encode` may replace the encoder's `forward`: only if no `forward` in the encoder was replaced."""
    return not any("forward" in vars(module) for module in encoder.modules())


def is_runaway(tokens: Sequence[int], seconds: float, vocab_size: int) -> bool:
    """Return whether a text has too many tokens for `seconds` of sound, or repeats itself, which shows in its
    compression ratio."""
    if len(tokens) > TOKENS_A_SECOND * seconds + TOKENS_MORE:
        return True
    size = int(math.log2(vocab_size) / 8) + 1
    return compression_ratio(b"".join(token.to_bytes(size, "little") for token in tokens)) > COMPRESSIBLE


def compression_ratio(content: bytes) -> float:
    """Return the ratio of the sizes before and after zlib: high for a text that repeats itself, 0 for an empty text."""
    return len(content) / len(zlib.compress(content))


def has_end_token(tokens: Sequence[int], config: Any) -> bool:
    """Return whether a text ends with an end-of-text token. If not, it was cut off at the maximum length."""
    end = config.eos_token_id
    return bool(tokens) and tokens[-1] in (end if isinstance(end, (list, tuple)) else [end])
