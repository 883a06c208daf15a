"""Whisper's decoder as a target: it scores token trees, given the encoder's states of audio windows.

Long recordings are decoded window by window, by `mmdec.transcribe` (`long_form.py`), or by transformers' own code,
which calls mmdec's decoding loop through `custom_generate`, once for each window and temperature. The input here is one
batch of encoded windows, with prompts.
The last part of the file handles what `generate` does besides the loop: logits processors, attention, warnings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperNoSpeechDetection,
    WhisperTimeStampLogitsProcessor,
)
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from mmdec.compat import CACHE_ARGUMENT
from mmdec.kernels.tree_attention import TreeMask
from mmdec.nn.int8 import has_int8_layers
from mmdec.targets.attention import tree_masks
from mmdec.targets.encoded import EncodedPrompt, EncodedSession, EncodedTarget
from mmdec.targets.hf_target import has_hooks, model_name
from mmdec.targets.tokenwise import is_half_on_cpu
from mmdec.types import Draft, Needs, PrefillOutput, Scores
from mmdec.whisper.decoder import FastDecoder, PassShare, can_use_eager_copy, eager_copy
from mmdec.whisper.output_layer import vocabulary_scores

GENERATE_WARNINGS = ("Passing `generation_config` together with", "Both `max_new_tokens`")
LANGUAGE_CODES: dict[str, str] = TO_LANGUAGE_CODE  # English name in lower case -> code: "french" -> "fr"


@final
class WhisperTarget(EncodedTarget):
    """Scores token trees with a Whisper model, which is not changed.

    Args:
        model: The Whisper.

    Raises:
        InputError: If the model's attention implementation cannot take tree masks.
    """

    decodes_once: ClassVar[bool] = False  # `generate` calls the decoding loop once for each window and temperature
    counts_padding: ClassVar[bool] = False
    exposes_last_layer: ClassVar[bool] = False  # transformers returns the last layer's output only after the final norm
    encodes_sound: ClassVar[bool] = True
    batch_processors: ClassVar[tuple[type, ...]] = (WhisperNoSpeechDetection,)  # it encodes all audio again

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        return isinstance(model, WhisperForConditionalGeneration)

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        super().__init__(model, model.config.decoder_layers, model.config.max_target_positions)

    @property
    def name(self) -> str:
        """The model and a hash of its weights, and "-int8" for int8 weights, whose passes take another time."""
        return model_name(self.model) + "-int8" * has_int8_layers(self.model)

    def prompt_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Return None: a window's prompt is read by itself."""

    def prefill_in_pieces(
        self, inputs: Mapping[str, Any], needs: Needs, size: int | None
    ) -> Iterator[PrefillOutput[EncodedSession]]:
        """Run `prefill` in one piece, because a Whisper's prompt is short."""
        yield self.prefill(inputs, needs)

    def shares_passes(self, session: EncodedSession) -> bool:
        """Return whether a session has one row and no hook listens to the decoder, which shared passes do not call."""
        return session.reader is not None and len(session.prompt) == 1 and not has_hooks(self.model.model.decoder)

    @torch.no_grad()
    def score_together(self, parts: Sequence[tuple[EncodedSession, Draft]]) -> list[Scores]:
        shares, trees = list[PassShare](), list[TreeMask]()
        for session, draft in parts:
            tree, positions = self._mask_and_positions(session, draft)
            position_ids = torch.tensor(positions, device=draft.tokens.device)
            trees += [] if tree is None else [tree]
            mask = None if tree is None else tree.additive
            shares.append(PassShare(draft.tokens, position_ids, mask, session.cache))
        with tree_masks(trees):
            states: Tensor = parts[0][0].reader.run_shares(shares)
        sizes = [share.ids.shape[1] for share in shares]
        scores = vocabulary_scores(self.model.proj_out, states)
        results = zip(scores.split(sizes, 1), states.split(sizes, 1), strict=True)
        for (session, _), size in zip(parts, sizes, strict=True):
            session.rows.record_draft(size)
        return [
            Scores(logits, dict.fromkeys(session.layers, last), mean_nodes_per_row=-(-sum(sizes) // len(sizes)))
            for (session, _), (logits, last) in zip(parts, results, strict=True)
        ]

    def release(self, session: EncodedSession) -> None:
        """Do nothing: each recording has a cache of its own."""

    @torch.no_grad()
    def encode(self, input_features: Tensor) -> Tensor | None:
        """Return the encoder's states (B, S, H) of input features (B, mels, T); None if their shape does not fit."""
        config = self.model.config
        if input_features.shape[1:] != (config.num_mel_bins, 2 * config.max_source_positions):
            return None
        states: Tensor = self.model.get_encoder()(input_features.to(self.model.dtype)).last_hidden_state
        return states

    def _make_reader(
        self, prompt: EncodedPrompt, cache: EncoderDecoderCache, layers: tuple[int, ...]
    ) -> FastDecoder | None:
        """Make a decoder that scores drafts with less Python overhead.

        Returns:
            None if the model's decoder is not transformers' own, or if the drafter reads other layers than -1.
        """
        decoder, states = self.model.model.decoder, prompt.encoded[0]
        if set(layers) - {-1} or not FastDecoder.can_replace(decoder):
            return None
        quick = FastDecoder(decoder)
        if len(states) == len(prompt.ids):
            quick.store_encoder_states(states, cache)
        return quick

    def _is_tokenwise(self, session: EncodedSession) -> bool:
        return session.reader is not None and is_half_on_cpu(self.model)

    def _run_prompt(self, prompt: EncodedPrompt, session: EncodedSession) -> Scores:
        states, layers = session.encoded[0], session.layers
        out = self._forward(prompt.ids, prompt.mask_given, prompt.positions, states, session.cache, layers)
        return Scores(self.model.proj_out(out.last_hidden_state[:, -1:]), self._features(out, layers))

    def _run_draft(
        self, session: EncodedSession, tokens: Tensor, tree: TreeMask | None, positions: Tensor, cache: Any
    ) -> Scores:
        mask, layers = None if tree is None else tree.additive, session.layers
        with tree_masks(() if tree is None else (tree,)):
            out = self._forward(tokens, mask, positions[0], session.encoded[0], cache, layers, session.reader)
        logits = vocabulary_scores(self.model.proj_out, out.last_hidden_state)
        return Scores(logits, self._features(out, layers))

    def _run_finished_text(self, text: EncodedPrompt, cache: Any, config: GenerationConfig, **flags: bool) -> Any:
        """Run the decoder over a finished text.

        For word timestamps, "eager" attention replaces "sdpa", because only "eager" returns attention maps.
        """
        maps = bool(getattr(config, "return_token_timestamps", False)) and can_use_eager_copy(self.model)
        decoder = eager_copy(self.model.model.decoder) if maps else None
        return self._forward(text.ids, text.mask_given, text.positions, text.encoded[0], cache, (), decoder, **flags)

    def _forward(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        states: Tensor,
        cache: Any,
        layers: tuple[int, ...],
        # a faster module that runs instead of the model's decoder; None: the decoder itself runs
        quick: nn.Module | None = None,
        **outputs: bool,
    ) -> Any:
        if any(layer != -1 for layer in layers):
            outputs["output_hidden_states"] = True
        return (self.model.model.decoder if quick is None else quick)(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            encoder_hidden_states=states,
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
            **outputs,
        )

    def _features(self, out: Any, layers: tuple[int, ...]) -> dict[int, Tensor]:
        return {layer: out.last_hidden_state if layer == -1 else out.hidden_states[layer + 1] for layer in layers}


def generate_processors(
    settings: Any, device: Any, prompt_length: int, timestamps: bool
) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Make the logits processors that `model.generate` would use, in its order.

    Args:
        settings: The model's generation config, which has the suppressed tokens.
        device: The model's device.
        prompt_length: Number of tokens of each prompt.
        timestamps: Whether the rules for timestamp tokens apply.
    """
    processors: list[Any] = []
    if settings.begin_suppress_tokens is not None:
        begin = SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, prompt_length, device=device)
        processors.append(begin)
    if settings.suppress_tokens is not None:
        processors.append(SuppressTokensLogitsProcessor(settings.suppress_tokens, device=device))
    if timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(settings, begin_index=prompt_length))
    return processors


@contextmanager
def restore_attention(model: WhisperForConditionalGeneration) -> Iterator[None]:
    """Restore the model's attention implementation afterwards: `generate` with word timestamps sets it to "eager"."""
    before = model.config._attn_implementation or "sdpa"
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def hide_generate_warnings() -> Iterator[None]:
    """Hide warnings of transformers (5.23) about arguments that its own `generate` passes."""
    log = logging.getLogger("transformers.generation.utils")

    def drop(record: logging.LogRecord) -> bool:  # new in each call: each thread removes only its own filter
        return not record.getMessage().startswith(GENERATE_WARNINGS)

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)
