"""Whisper's decoder as a target: it scores token trees, given one window's encoder states.

transformers' own long-form code (windows, fallback, timestamps, prompts) calls the loop through `custom_generate`, once
for each window and temperature. The input here is one batch of encoded windows and the decoder's prompts. The last part
of the file handles what `generate` does besides the loop: logits processors, attention, warnings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
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
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from mmdec.decode.tree import single
from mmdec.nn.int8_linear import quantised
from mmdec.ops.tree_attention import LARGEST, TreeMask
from mmdec.targets.cache import KVPool, RowLayout, check_cache, keep_path
from mmdec.targets.fast_pass import FastRun, fast_pass
from mmdec.targets.hf_target import (
    HfTarget,
    check_attention,
    check_layers,
    hooked,
    model_name,
    output_states,
)
from mmdec.targets.whisper_call import SOUND, can_twin, eager_twin
from mmdec.targets.whisper_decoder import FastDecoder, Piece
from mmdec.targets.whisper_together import Together
from mmdec.types import Context, Draft, InputError, Needs, Scores, Verdict

READ = {"input_ids", "encoder_outputs", "decoder_attention_mask", "past_key_values"}
# inputs that are ignored, because they do not change a pass: Whisper's encoder uses no attention mask
LET_BE = {"use_cache", "attention_mask", "output_attentions", "output_hidden_states"}
OWN_WARNINGS = ("Passing `generation_config` together with", "Both `max_new_tokens`")
LANGUAGE_CODES: dict[str, str] = TO_LANGUAGE_CODE  # English name in lower case -> code: "french" -> "fr"


@dataclass(frozen=True)
class WhisperPrompt:
    """The inputs of a prompt's pass, checked and normalised."""

    ids: Tensor  # (B, P)
    states: Tensor  # (B, S, H)
    mask: Tensor  # (B, P) bool
    mask_given: Tensor | None  # the caller's mask, if there was one
    positions: Tensor  # (B, P)
    holes: bool  # whether a row has padding after its first token
    sound: Tensor | None = None  # (B, mels, T) what was encoded, where it is known

    @classmethod
    def of(cls, inputs: Mapping[str, Any], most: int) -> WhisperPrompt:
        unknown = sorted(name for name, value in inputs.items() if name not in READ | LET_BE and value is not None)
        ids, encoded = inputs.get("input_ids"), inputs.get("encoder_outputs")
        if unknown or not isinstance(ids, Tensor) or encoded is None:
            raise InputError(
                "`inputs` must hold the decoder's `input_ids` and `encoder_outputs` and may hold "
                f"`decoder_attention_mask`, but holds {unknown or sorted(inputs)}. Call `model.generate(features, "
                "custom_generate=mmdec.speculate(...))`, which prepares them."
            )
        cache = inputs.get("past_key_values")
        if cache is not None:
            check_cache(cache)
            if cache.get_seq_length():
                raise InputError(
                    f"`past_key_values` must be empty, but holds {cache.get_seq_length()} columns. Leave it out."
                )
        batch, width = ids.shape
        if width > most:
            raise InputError(f"`input_ids` must have at most {most} columns, but has {width}. Shorten the prompt.")
        given = inputs.get("decoder_attention_mask")
        if given is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
            positions = torch.arange(width, device=ids.device).expand(batch, -1)
            return cls(ids, encoded[0], mask, None, positions, False, getattr(encoded, SOUND, None))
        if given.shape != ids.shape or not bool(given[:, -1].all()):
            raise InputError(
                f"`decoder_attention_mask` must be {tuple(ids.shape)} with 1 at the end of every row, but is "
                f"{tuple(given.shape)}. Pad on the left."
            )
        mask = given.bool()
        counted = mask.long().cumsum(-1)
        holes = bool((counted[:, -1] + mask.long().argmax(1) != width).any())
        positions = (counted - 1).masked_fill(~mask, 0)
        return cls(ids, encoded[0], mask, given, positions, holes, getattr(encoded, SOUND, None))

    def rows(self) -> RowLayout:
        """The layout of the rows once their holes are closed."""
        return RowLayout.of_prompt(self.mask, self.positions)


@dataclass
class WhisperSession:
    """The state of one run: its cache (with keys and values of the encoder's states), its rows, and the encoder's
    states."""

    cache: Cache
    store: KVPool
    rows: RowLayout
    states: Tensor  # (B, S, H)
    layers: tuple[int, ...]
    quick: FastDecoder | None  # scores drafts with less Python overhead; None if the model does not allow it
    fast: FastRun | None = None  # scores drafts in fixed shapes, for CUDA graphs; None if that is not used


@final
class WhisperTarget(HfTarget):
    """Scores token trees with a Whisper model, which is not changed; several runs may share it.

    Layers are counted from 0; -1 is the last one, final norm included. The attention implementation may be "sdpa" or
    "eager".
    """

    one_run: ClassVar[bool] = False  # the loop runs for each window and temperature
    reads_encoder: ClassVar[bool] = True
    encodes: ClassVar[bool] = True
    batch_processors: ClassVar[tuple[type, ...]] = (WhisperNoSpeechDetection,)  # encodes the batch's audio again

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Whether this is a complete Whisper."""
        return isinstance(model, WhisperForConditionalGeneration)

    def __init__(self, model: WhisperForConditionalGeneration, together: Together | None = None) -> None:
        """together: shares passes with other runs. Raises InputError as `check_attention` does."""
        config = model.config
        check_attention(config)
        self.model, self._together = model, together
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.d_model
        self.layers: int = config.decoder_layers
        self.positions: int | None = config.max_target_positions

    @property
    def name(self) -> str:
        """Names the model's source and a digest of its weights, and what makes its passes cost otherwise."""
        return model_name(self.model) + "-int8" * quantised(self.model) + "-together" * (self._together is not None)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @torch.no_grad()
    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> tuple[WhisperSession, Context, Draft, Scores]:
        """Run the decoder's prompt.

        inputs: input_ids (B, P); encoder_outputs, whose first part is (B, S, H); optional decoder_attention_mask (B,
            P), padded on the left; optional past_key_values, which must be empty. At batch 1 this cache is filled as
            `generate` would fill it; for larger batches see `reread`.
        """
        if self._together is not None:
            return self._together.alone(partial(WhisperTarget(self.model).prefill, inputs, needs))
        check_layers(needs, self.layers - 1)  # transformers gives the last layer's output with its norm only
        prompt = WhisperPrompt.of(inputs, self.model.config.max_target_positions)
        # otherwise a cache of the caller could not be filled during the run
        own = len(prompt.ids) == 1 and not prompt.holes
        cache = (inputs.get("past_key_values") if own else None) or EncoderDecoderCache(DynamicCache(), DynamicCache())
        decoder = self.model.model.decoder
        quick = FastDecoder(decoder) if not set(needs.layers) - {-1} and FastDecoder.fits(decoder) else None
        if quick is not None and len(prompt.states) == len(prompt.ids):
            quick.remember(prompt.states, cache)
        out = self._decoder(prompt.ids, prompt.mask_given, prompt.positions, prompt.states, cache, needs.layers)
        fast = None if quick is None else fast_pass(self.model).begin(cache)
        session = WhisperSession(cache, KVPool(cache, fast), prompt.rows(), prompt.states, needs.layers, quick, fast)
        if prompt.holes:
            columns = [row.nonzero()[:, 0].tolist() for row in prompt.mask]
            session.store.commit(columns, session.rows.starts, session.rows.width)
        features = self._features(out, needs.layers)
        context = Context(
            tokens=prompt.ids,
            mask=prompt.mask,
            positions=prompt.positions[None],
            next_position=prompt.positions[:, -1] + 1,
            features=features,
            embeds=self.model.get_input_embeddings()(prompt.ids) if needs.embeds else None,
            memory=prompt.states if needs.memory else None,
            sound=prompt.sound if needs.memory else None,
            room=self.model.config.max_target_positions - 1 - prompt.positions[:, -1],
        )
        last = {layer: states[:, -1:] for layer, states in features.items()}
        logits = self.model.proj_out(out.last_hidden_state[:, -1:])
        return session, context, single(prompt.ids[:, -1]), Scores(logits, last)

    @torch.no_grad()
    def encode(self, sound: Tensor) -> Tensor | None:
        """The encoder's states (B, S, H) of features (B, mels, T); None if it reads other features."""
        config = self.model.config
        if sound.shape[1:] != (config.num_mel_bins, 2 * config.max_source_positions):
            return None
        states: Tensor = self.model.get_encoder()(sound.to(self.model.dtype)).last_hidden_state
        return states

    @torch.no_grad()
    def score(self, session: WhisperSession, draft: Draft) -> Scores:
        """Run the decoder over the draft's tree. Its columns stay in the cache until `commit`."""
        if self._together is not None:
            alone = WhisperTarget(self.model)
            if session.quick is None or session.fast is not None:
                return self._together.alone(partial(alone.score, session, draft))
            return self._together.pass_of(alone.score_several, (session, draft))
        rows, device = session.rows, draft.tokens.device
        run = partial(self._draft, session.states, session.layers, session.quick)
        if session.fast is not None and draft.tokens.shape[1] <= LARGEST:
            return session.fast.score(draft, session.store, rows, session.layers, None, run)
        tree, positions = rows.see(draft.parents.tolist(), device, self.model.dtype)
        scores = run(draft.tokens, tree, torch.tensor([positions], device=device), session.cache)
        rows.wait(draft.tokens.shape[1])
        return scores

    @torch.no_grad()
    def score_several(self, drafts: Sequence[tuple[WhisperSession, Draft]]) -> list[Scores]:
        """`score` for the drafts of several runs (B = 1) in one pass; each session has a fast decoder."""
        pieces = list[Piece]()
        for session, draft in drafts:
            tree, positions = session.rows.see(draft.parents.tolist(), draft.tokens.device, self.model.dtype)
            places = torch.tensor(positions, device=draft.tokens.device)
            cache = cast(EncoderDecoderCache, session.cache)
            pieces.append(Piece(draft.tokens, places, None if tree is None else tree.additive, cache))
        quick = drafts[0][0].quick
        assert quick is not None
        states = quick.together(pieces)
        sizes = [piece.ids.shape[1] for piece in pieces]
        parts = zip(vocabulary_scores(self.model.proj_out, states).split(sizes, 1), states.split(sizes, 1), strict=True)
        for (session, _), size in zip(drafts, sizes, strict=True):
            session.rows.wait(size)
        return [
            Scores(logits, dict.fromkeys(session.layers, last))
            for (session, _), (logits, last) in zip(drafts, parts, strict=True)
        ]

    def _draft(
        self,
        states: Tensor,
        layers: tuple[int, ...],
        quick: FastDecoder | None,
        tokens: Tensor,
        tree: TreeMask | None,
        positions: Tensor,
        cache: Any,
    ) -> Scores:
        mask = None if tree is None else tree.additive
        out = self._decoder(tokens, mask, positions[0], states, cache, layers, quick)
        return Scores(vocabulary_scores(self.model.proj_out, out.last_hidden_state), self._features(out, layers))

    @torch.no_grad()
    def commit(self, session: WhisperSession, verdict: Verdict) -> None:
        """Keep the accepted path's columns and drop the others. After the prompt's pass nothing changes."""
        keep_path(session.rows, session.store, verdict.path)

    @torch.no_grad()
    def select(self, session: WhisperSession, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order, also of the encoder's states."""
        session.rows.select(live.tolist())
        session.store.select(live, session.rows.width)
        session.states = session.states.index_select(0, live.to(session.states.device))

    @torch.no_grad()
    def reread(
        self, inputs: Mapping[str, Any], sequences: Tensor, cache: Any = None, maps: bool = False, **outputs: bool
    ) -> Any:
        """Run the decoder once over the finished text (B, L) without its last token.

        This gives attentions and hidden states of every step, and fills an empty cache of the caller. maps: attend by
        "eager", which "sdpa" models need for attentions. outputs: the decoder's flags. Padding after a row's end is
        attended to, as in transformers' loop.
        """
        prompt = WhisperPrompt.of({**inputs, "past_key_values": None}, self.model.config.max_target_positions)
        text = sequences[:, :-1]
        more = text.shape[1] - prompt.ids.shape[1]
        mask = prompt.mask_given
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(text), more)], 1)
        steps = torch.arange(1, more + 1, device=text.device)
        positions = torch.cat([prompt.positions, prompt.positions[:, -1:] + steps], 1)
        if cache is None:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        decoder = eager_twin(self.model.model.decoder) if maps else None
        return self._decoder(text, mask, positions, prompt.states, cache, (), decoder, **outputs)

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs unchanged: ids (B, P) are always the whole text."""
        return inputs

    def keeps_cache(self, inputs: Mapping[str, Any], config: GenerationConfig) -> bool:
        """False: `output` fills a cache that the caller reads."""
        return False

    def extend(self, inputs: Mapping[str, Any], sequences: Tensor) -> None:
        """Nothing to do: see `keeps_cache`."""

    def output(
        self,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: Sequence[int],
        config: GenerationConfig,
        scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None,
    ) -> GenerateEncoderDecoderOutput:
        """Make transformers' output object for sequences (B, L) with `lengths` new tokens in each row.

        Attentions and hidden states are computed by one more pass over the whole text.
        """
        cache = inputs.get("past_key_values")
        flags = {name: True for name in ("output_attentions", "output_hidden_states") if getattr(config, name)}
        # at larger batches the run used its own cache
        empty = cache if cache is not None and not cache.get_seq_length() else None
        states: dict[str, Any] = {}
        if flags or empty is not None:
            maps = bool(getattr(config, "return_token_timestamps", False)) and can_twin(self.model)
            decoded = self.reread(inputs, sequences, empty, maps=maps, **flags)
            prompt = sequences.shape[1] - max(lengths)
            states = output_states(decoded, inputs["encoder_outputs"], prompt, sequences.shape[1] - 1, config)
        return GenerateEncoderDecoderOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=cast(Any, scores),
            logits=cast(Any, logits),
            past_key_values=cache,
            **states,
        )

    def _decoder(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        states: Tensor,
        cache: Any,
        layers: tuple[int, ...],
        quick: nn.Module | None = None,  # in place of the model's decoder
        **outputs: bool,
    ) -> Any:
        if any(layer != -1 for layer in layers):
            outputs["output_hidden_states"] = True
        return (self.model.model.decoder if quick is None else quick)(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            encoder_hidden_states=states,
            past_key_values=cache,
            use_cache=True,
            **outputs,
        )

    def _features(self, out: Any, layers: tuple[int, ...]) -> dict[int, Tensor]:
        return {layer: out.last_hidden_state if layer == -1 else out.hidden_states[layer + 1] for layer in layers}


def generate_processors(
    model: WhisperForConditionalGeneration, prompt_length: int, timestamps: bool
) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """The logits processors of `generate`, in its order, for prompts of `prompt_length` columns.

    timestamps: whether the rules for timestamp tokens apply.
    """
    config: Any = model.generation_config
    device: Any = model.device  # transformers declares a str
    processors: list[Any] = []
    if config.begin_suppress_tokens is not None:
        begin = SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_length, device=device)
        processors.append(begin)
    if config.suppress_tokens is not None:
        processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    if timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=prompt_length))
    return processors


FEW = range(2, 11)  # numbers of columns for which a large vocabulary's product is faster transposed
LARGE = 2**14  # minimum number of tokens in a large vocabulary


def vocabulary_scores(output: nn.Module, states: Tensor) -> Tensor:
    """Apply the output layer to states (B, N, H) -> logits (B, N, V).

    On a CPU and in float32, the product for a few columns is computed transposed, as (W hT)T: matrix libraries split
    that product along the vocabulary. Measured on an EPYC, one thread, 51,865 tokens of 512 channels, 2 / 3 / 4 / 8
    columns: 22 / 34 / 19 / 22 ms without, 6 / 9 / 9 / 14 ms with it; with 12 and more columns it is slower. The sums
    have another order, so logits differ by up to 1e-6.
    """
    columns = states.shape[0] * states.shape[1]
    plain = type(output) is nn.Linear and output.bias is None and not hooked(output)
    if plain and columns in FEW and states.device.type == "cpu" and states.dtype == torch.float32:
        weight = cast(nn.Linear, output).weight
        if len(weight) >= LARGE and weight.dtype == torch.float32:
            scores = torch.mm(weight, states.reshape(columns, -1).t())  # (V, B N)
            return scores.t().contiguous().view(*states.shape[:2], -1)
    return output(states)


@contextmanager
def attention_restored(model: WhisperForConditionalGeneration) -> Iterator[None]:
    """Restore the model's attention implementation at the end: `generate` with word timestamps sets "eager" and leaves
    it."""
    before = model.config._attn_implementation or "sdpa"
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def without_own_warnings() -> Iterator[None]:
    """Suppress warnings about arguments that `generate` (5.23) itself passes to each window."""
    log = logging.getLogger("transformers.generation.utils")

    def drop(record: logging.LogRecord) -> bool:  # one function per call, so that a thread removes only its own filter
        return not record.getMessage().startswith(OWN_WARNINGS)

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)
