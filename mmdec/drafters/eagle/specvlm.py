"""SpecVLM (arXiv 2509.11815): EAGLE-2's draft network with an input norm and an image compressor.

The compressor depends on the question. Position t reads token t + 1, and counts as visual if token t + 1 is visual. The
visual positions of each image are compressed together and enter the drafter's cache once, at their positions in the
text. Text positions have the same input as in EAGLE.

The elastic compressor (section 3.2) compresses an image in one of several ways; a gate reads the question and chooses
the way. The paper compresses the projector's output, and does not say what happens to the target's features of dropped
tokens. Here the pair [embedding; feature] is compressed. If possible this happens before fc, which then has fewer
inputs. For dropping and averaging the result is the same as after fc, which is affine; a depthwise convolution is
applied before fc.

Letters in shapes: V visual tokens of one image, J channels before fc, H after fc, C choices of the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor, nn

from mmdec.drafters.eagle.eagle import EagleInputNetwork
from mmdec.drafters.networks.compressors import (
    CompressedImage,
    Convolution,
    Grid,
    Pool,
    Prune,
    Pruning,
    Resampler,
    TextOnly,
    image_spans,
    separate_positions,
)
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.draft_network import PromptInput
from mmdec.drafters.networks.weights import check_size
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError

Fc = Callable[[Tensor], Tensor]
Variant = Literal["select", "weighted", "concat"]
COMPRESSORS = ("prune", "pool", "conv", "resampler", "text-only")
AVERAGED_COMPRESSORS = ("prune", "pool", "conv")  # compressors whose outputs the variant "weighted" averages
# compressors whose outputs the variant "concat" concatenates
CONCATENATED_COMPRESSORS = ("prune", "pool", "conv", "resampler")


@final
class QuestionGate(nn.Module):
    """Computes logits of the compressors from the question and the target's state, by two linear layers.

    The paper gives no sizes of the layers.
    """

    def __init__(self, embeds: int, features: int, inner: int, choices: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(embeds + features, inner), nn.Linear(inner, choices)

    def forward(self, question: Tensor, feature: Tensor) -> Tensor:
        """Compute logits (..., C) of the C choices.

        Args:
            question: (..., E), mean embedding of the question's tokens.
            feature: (..., F), the target's features at the question's last token.
        """
        return self.out(nn.functional.silu(self.hidden(torch.cat([question, feature], -1))))


def choose_compressor(logits: Tensor, temperature: float, training: bool) -> tuple[int, Tensor | None]:
    """Choose one of C compressors by logits (C,).

    Evaluation takes the best choice. Training samples with Gumbel noise and uses a straight-through gradient. The
    choices' outputs differ in length and cannot be averaged. So the gradient is that of the chosen output times its
    softmax probability (not in the paper, which gives no formula). "text-only" has no output, so it gives no gradient.

    Args:
        temperature: Temperature of the softmax in training.

    Returns:
        Its index; and in training a factor of value 1, else None. The caller multiplies the output by the factor,
        through which the gate gets its gradient.
    """
    if not training:
        return int(logits.argmax()), None
    noise = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + noise) / temperature).softmax(-1)
    choice = int(soft.argmax())
    return choice, 1 + soft[choice] - soft[choice].detach()


@final
class ElasticCompressor(nn.Module):
    """Compresses images with several compressors, in one of three variants.

    Holds the compressors.

    "select": the gate chooses one compressor. "weighted": the outputs of prune, pool and conv, at the same ratio, are
    averaged with weights from the gate. "concat": the outputs of prune, pool, conv and resampler are concatenated.

    Args:
        sizes: (J, H), channels before and after fc.
        variant: "select", "weighted" or "concat".
        choices: Names of the compressors for "select".
        ratios: Tokens per output of prune, pool and conv; the defaults are the paper's; "weighted" needs three equal
            ratios (3 in the paper).
        resampler: The resampler's number of queries and of attention heads.
        grid: Rows and columns of an image's tokens.
        pruning: Which tokens prune keeps, "random" or "strided".
        depthwise: True: the convolution has one filter per channel and is applied before fc. False: the convolution has
            H x H x ratio weights and is applied after fc to all tokens, which takes three quarters of EAGLE's time for
            an image. (The paper says "vanilla").
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        variant: Variant = "select",
        choices: Sequence[str] = COMPRESSORS,
        ratios: tuple[int, int, int] = (20, 20, 3),
        resampler: tuple[int, int] = (2, 1),
        *,
        grid: Grid | None = None,
        pruning: Pruning = "random",
        depthwise: bool = True,
    ) -> None:
        super().__init__()
        self.variant: Variant = variant
        self.choices = (
            tuple(choices)
            if variant == "select"
            else AVERAGED_COMPRESSORS
            if variant == "weighted"
            else CONCATENATED_COMPRESSORS
        )
        if not self.choices or not set(self.choices) <= set(COMPRESSORS):
            raise InputError(f"`choices` must be some of {', '.join(COMPRESSORS)}, but is {self.choices!r:.80}.")
        prune, pool, conv = ratios
        if variant == "weighted":
            if len(set(ratios)) > 1:
                raise InputError(f"`ratios` must be equal to be mixed, but are {ratios}. 3 is the paper's.")
            # no grid: with a grid, pooling might give another number of outputs than the other two compressors, but the
            # outputs of all three are averaged
            grid = None
        makers: dict[str, Callable[[], nn.Module]] = {
            "prune": lambda: Prune(prune, pruning),
            "pool": lambda: Pool(pool, grid),
            "conv": lambda: Convolution(sizes[0] if depthwise else sizes[1], conv, depthwise),
            "resampler": lambda: Resampler(sizes[1], *resampler),
            "text-only": TextOnly,
        }
        self.before = {"prune", "pool", "text-only"} | ({"conv"} if depthwise else set())
        self.parts = nn.ModuleDict({name: makers[name]() for name in self.choices})

    def forward(
        self, inputs: Tensor, fc: Fc, weights: Tensor | None = None, choice: int = 0, matrix: Tensor | None = None
    ) -> CompressedImage:
        """Compress one image.

        Args:
            inputs: (V, J), [embedding; feature] of each visual token.
            fc: A function from (..., J) to (..., H).
            matrix: Weight (H, J) of `fc` if `fc` is affine, else None.
            weights: (C,), the gate's softmax, for "weighted".
            choice: Index of the compressor that the gate chose, for "select".

        Returns:
            States with ascending, distinct positions. An image with fewer tokens than outputs is not compressed.
        """
        if self.variant == "select":
            compressed = self._part(self.choices[choice], inputs, fc, matrix)
        elif self.variant == "weighted":
            assert weights is not None
            parts = [self._part(name, inputs, fc, matrix) for name in self.choices]
            compressed = CompressedImage(
                torch.stack([weight * part.states for weight, part in zip(weights, parts, strict=True)]).sum(0),
                parts[1].positions,
                torch.stack([w * part.visual_weights for w, part in zip(weights.detach(), parts, strict=True)]).sum(0),
            )
        else:
            parts = [self._part(name, inputs, fc, matrix) for name in self.choices]
            compressed = CompressedImage(
                torch.cat([part.states for part in parts]),
                torch.cat([part.positions for part in parts]),
                torch.stack([part.visual_weights for part in parts]).amax(0),
            )
        length = len(inputs)
        if len(compressed.states) > length:
            positions = torch.arange(length, device=inputs.device)
            return CompressedImage(fc(inputs), positions, torch.ones(length, device=inputs.device, dtype=inputs.dtype))
        order = compressed.positions.argsort(stable=True)
        positions = separate_positions(compressed.positions[order], length)
        return CompressedImage(compressed.states[order], positions, compressed.visual_weights)

    def _part(self, name: str, inputs: Tensor, fc: Fc, matrix: Tensor | None) -> CompressedImage:
        part = self.parts[name]
        if name in self.before:
            compressed = part(inputs)
            return CompressedImage(fc(compressed.states), compressed.positions, compressed.visual_weights)
        if name == "resampler" and matrix is not None:
            return part(inputs, (matrix, fc))
        return part(fc(inputs))


MAX_RATIO = 4096


@dataclass(frozen=True)
class SpecVLMConfig(DraftConfig):
    """Sizes and options of a SpecVLM network.

    Ratios and number of queries are the paper's; the paper does not give the gate's size and temperature, or a grid.
    """

    input_norm: bool = True  # the paper's change to EAGLE's layer; `fc_norm` is the other possible reading of the paper
    variant: Variant = "select"
    compressors: tuple[str, ...] = COMPRESSORS  # compressors of the variant "select"; a single one needs no gate
    prune_ratio: int = 20
    pool_ratio: int = 20
    conv_ratio: int = 3
    # tokens per output of the three compressors in the variant "weighted"; the paper tries up to 5
    mixed_ratio: int = 3
    queries: int = 2
    pruning: str = "random"  # which tokens are kept: "random", or "strided": every n-th for the ratio n
    depthwise: bool = True  # whether the convolution has one filter per channel, and is applied before fc
    grid: Grid | None = None  # (rows, columns) of an image's tokens, if all images have the same, else None
    gate_size: int = 64
    gate_temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "compressors", tuple(self.compressors))
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))
        for name in ("prune_ratio", "pool_ratio", "conv_ratio", "mixed_ratio", "queries", "gate_size"):
            check_size(name, getattr(self, name), MAX_RATIO)
        if self.grid is not None:
            if len(self.grid) != 2:
                raise InputError(f"`grid` must be rows and columns, but is {self.grid!r:.60}. Leave it out.")
            for size in self.grid:
                check_size("grid", size, MAX_RATIO)
        if self.variant not in ("select", "weighted", "concat"):
            raise InputError(f"`variant` must be select, weighted or concat, but is {self.variant!r:.60}.")
        if not self.compressors or not set(self.compressors) <= set(COMPRESSORS):
            raise InputError(f"`compressors` must be of {', '.join(COMPRESSORS)}, but is {self.compressors!r:.80}.")
        if self.pruning not in ("random", "strided"):
            raise InputError(f"`pruning` must be random or strided, but is {self.pruning!r:.60}.")
        if type(self.gate_temperature) not in (int, float) or not 1e-3 <= self.gate_temperature <= 1e3:
            raise InputError(
                f"`gate_temperature` must be from 0.001 to 1000, but is {self.gate_temperature!r:.60}. 1 is usual."
            )


@built_in_network("specvlm", note="SpecVLM: reads a shortened picture; a gate chooses how it is shortened.")
@final
class SpecVLM(EagleInputNetwork):
    """SpecVLM's network. Holds EAGLE's layer, the image compressor, and the gate if there is one."""

    config_class: ClassVar[type[DraftConfig]] = SpecVLMConfig

    def __init__(self, config: SpecVLMConfig) -> None:
        super().__init__(config)
        mixed = config.variant == "weighted"
        heads = config.num_attention_heads if config.hidden_size % config.num_attention_heads == 0 else 1
        ratios, shared = (config.prune_ratio, config.pool_ratio, config.conv_ratio), config.mixed_ratio
        self.compressor = ElasticCompressor(
            (self.fc.in_features, config.hidden_size),
            config.variant,
            config.compressors,
            (shared, shared, shared) if mixed else ratios,
            (config.queries, heads),
            grid=config.grid,
            pruning=cast(Any, config.pruning),
            depthwise=config.depthwise,
        )
        choices = len(self.compressor.choices)
        gated = mixed or (config.variant == "select" and choices > 1)
        features = config.hidden_size * len(config.layers)
        self.gate = QuestionGate(config.hidden_size, features, config.gate_size, choices) if gated else None

    def gate_logits(self, embeds: Tensor, features: Tensor, question: Tensor) -> Tensor:
        """Compute the gate's logits (C,) for one row.

        Args:
            embeds: (L, H).
            features: (L, k * H).
            question: (L,) bool, True at the question's tokens; if there are none, all tokens are used. The paper has no
                loss on the logits; training may add such a loss.

        Raises:
            InputError: If the network has no gate.
        """
        if self.gate is None:
            raise InputError("`compressors` must be two or more for a gate, but there is one. Name more of them.")
        if not bool(question.any()):
            question = torch.ones_like(question)
        return self.gate(embeds[question].mean(0), features[question][-1])

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor) -> PromptInput:
        """Compute the layer's input for the prompt of one row, without padding; images are compressed.

        The question that the gate reads is the text after the first image.

        Args:
            embeds: (L, H).
            features: (L, k * H).
            visual: (L,) bool, True at visual tokens.
        """
        config = cast(SpecVLMConfig, self.config)
        inputs = torch.cat([embeds[1:], features[:-1]], -1)  # shape (L - 1, J)
        images = image_spans(visual[1:], config.grid)
        if not images:
            return PromptInput(self._fc(inputs), torch.arange(len(inputs), device=inputs.device))
        choice, factor, weights = 0, None, None
        if self.gate is not None:
            logits = self.gate_logits(embeds, features, question_mask(visual))
            if config.variant == "weighted":
                weights = logits.softmax(-1)
            else:
                choice, factor = choose_compressor(logits, config.gate_temperature, self.training)
        text = (~visual[1:]).nonzero()[:, 0]
        states, columns = [self._fc(inputs[text])], [text]
        # position t reads token t + 1, so no position reads the first token
        visual_weights = [inputs.new_zeros(1)] if bool(visual[0]) else []
        matrix = None if config.fc_norm else self.fc.weight
        for begin, end in images:
            compressed = self.compressor(inputs[begin:end], self._fc, weights, choice, matrix)
            states.append(compressed.states if factor is None else compressed.states * factor)
            columns.append(compressed.positions + begin)
            visual_weights.append(compressed.visual_weights)
        order = torch.cat(columns).argsort()
        name = self.compressor.choices[choice] if config.variant == "select" else config.variant
        return PromptInput(torch.cat(states)[order], torch.cat(columns)[order], None, torch.cat(visual_weights), name)

    def _fc(self, inputs: Tensor) -> Tensor:
        size = self.config.hidden_size
        return self.fuse(inputs[..., :size], inputs[..., size:])


def question_mask(visual: Tensor) -> Tensor:
    """Find the question's tokens: the text after the first image, or all text if there is no image.

    Args:
        visual: (L,) bool, True at visual tokens.

    Returns:
        (L,) bool.
    """
    after = visual.cumsum(0) > 0
    return ~visual & after if bool(visual.any()) else ~visual


def expected_token_share(logits: Tensor, config: SpecVLMConfig, length: int) -> Tensor:
    """Compute the expected share of visual tokens that compression keeps, given the gate's logits (C,).

    Args:
        length: Number of visual tokens. Training may add the share to the loss as a cost (not in the paper, whose
            ratios are fixed).

    Returns:
        A scalar in [0, 1].
    """
    if config.variant == "weighted":  # its three compressors have the same ratio
        return logits.new_tensor(1 / config.mixed_ratio)
    shares: dict[str, float] = {
        "prune": 1 / config.prune_ratio,
        "pool": 1 / config.pool_ratio,
        "conv": 1 / config.conv_ratio,
        "resampler": config.queries / length,
        "text-only": 0.0,
    }
    return logits.softmax(-1) @ logits.new_tensor([min(1.0, shares[name]) for name in config.compressors])
