"""Measures how often a drafter's tokens equal those of the target's greedy answers.

For each prompt the target writes its greedy answer once; then one pass over prompt and answer gives the target's
features. With these features, the drafter drafts at all positions of the answer at once: its first tokens, and the
later tokens of chains, whose input after a right token is the same text as in decoding. So the rounds that decoding
with chains takes are counted without decoding. For trees, the answer is decoded again.

Sizes: P tokens of the prompt, N + 1 tokens of the answer, L = P + N tokens of the pass (without the answer's last one),
H channels. At the answer's token c, from 0, this token is the root, and the first drafted token should be token c + 1.
In names, a column is a token of the pass.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from mmdec.bench.prompts import INSTRUCTIONS
from mmdec.checks.sampling import evenly_spaced
from mmdec.drafters.networks.draft_network import DraftNetwork, PromptInput
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.networks.layers import KeyValues
from mmdec.errors import InputError
from mmdec.generation.generate import generate
from mmdec.hub.find import find_model
from mmdec.pretrained.language_model import (
    LANGUAGE_MODEL_FILES,
    LoadedLanguageModel,
    is_language_model,
    load_language_model,
)
from mmdec.pretrained.vlm import LoadedVlm, is_vision_language_model, load_vlm
from mmdec.targets.decoder import DecoderTarget
from mmdec.targets.ropes import max_positions
from mmdec.training.corpora.chats import SYSTEM_KEY, read_chats
from mmdec.types import Context, Drafter, Needs, Round
from mmdec.vision.questions import model_inputs, read_question, render_chat, user_message

MIN_ANSWER_TOKENS = 2  # a prompt is left out if its answer has fewer tokens


@dataclass(frozen=True)
class TargetAnswer:
    """A prompt, the target's answer, and what the target's pass over both recorded."""

    answer: list[int]  # N + 1 tokens
    context: Context  # from the target's pass over L tokens, a batch of one
    inputs: Mapping[str, Any]  # the target's inputs for the prompt

    @property
    def prompt(self) -> int:
        """P, the number of tokens of the prompt."""
        return self.context.tokens.shape[1] - self.positions

    @property
    def positions(self) -> int:
        """N, the number of positions in the answer where a draft can begin."""
        return len(self.answer) - 1


def answer_prompt(
    target: DecoderTarget, inputs: Mapping[str, Any], drafter: Drafter | None, tokens: int, needs: Needs
) -> TargetAnswer | None:
    """Let the target answer a prompt greedily, and run the target over prompt and answer.

    Args:
        inputs: The target's inputs for the prompt, a batch of one.
        drafter: Speeds up the answer without changing it.
        tokens: The most new tokens.
        needs: What the pass must record.

    Returns:
        The text; None for an answer of fewer than `MIN_ANSWER_TOKENS` tokens.

    Raises:
        InputError: For a prompt that leaves no room for an answer.
    """
    model: Any = target.model
    begin = inputs["input_ids"].shape[1]
    most = max_positions(model.config.get_text_config(decoder=True))
    room = tokens if most is None else min(tokens, most - max(target.prompt_positions(inputs)))
    if room < MIN_ANSWER_TOKENS:
        raise InputError(
            f"`data` must have prompts shorter than the model's {most} positions, but one has {begin}. Shorten "
            "that prompt."
        )
    written = generate(model, inputs, drafter, max_new_tokens=room, **_greedy(model)).sequences
    answer: list[int] = written[0, begin:].tolist()
    if len(answer) < MIN_ANSWER_TOKENS:
        return None
    added = len(answer) - 1
    inputs_with_answer = {
        name: pad(value, (0, added), value=int(name == "attention_mask"))
        if isinstance(value, Tensor) and value.shape == inputs["input_ids"].shape
        else value
        for name, value in inputs.items()
    }
    inputs_with_answer["input_ids"] = written[:, :-1]
    context = target.prefill(inputs_with_answer, needs).context
    return TargetAnswer(answer, context, inputs)


def decoding_rounds(
    model: PreTrainedModel, drafter: Drafter, text: TargetAnswer, nodes: int, depth: int
) -> list[Round]:
    """Decode an answer again with drafts of at most `nodes` tokens and `depth`, and return its rounds."""
    options = {"max_new_tokens": len(text.answer), **_greedy(model)}
    again = generate(model, text.inputs, drafter, num_speculative_tokens=(nodes, depth), **options)
    return again.rounds[1:]  # the first is the pass over the prompt


def _greedy(model: Any) -> dict[str, Any]:
    """Return options for greedy decoding without warnings, whatever the model's generation config says."""
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    ends = model.generation_config.eos_token_id
    if model.generation_config.pad_token_id is None and ends is not None:
        options["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    return options


@dataclass(frozen=True)
class NetworkRun:
    """One way to run a draft network: the network, and two settings that its configuration does not have.

    Args:
        scale: Factor on the text embeddings, for EAGLE-3.
        late: "tokens" or "features": at each token, the network reads this input of the token before instead; "":
            neither.
    """

    network: DraftNetwork
    embedding: nn.Module  # the target's token embedding
    output: nn.Linear  # the target's LM head
    scale: float = 1.0
    late: str = ""

    @property
    def table(self) -> nn.Module:
        """The token embedding: the network's own, or the target's."""
        embedding = self.network.own_embedding
        return self.embedding if embedding is None else embedding

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose features the network reads."""
        return self.network.config.layers

    def drafter(self) -> NetworkDrafter | None:
        """Build a drafter that runs the network in this way. None if `late` is set: no drafter can read inputs late."""
        if self.late:
            return None
        drafter = NetworkDrafter(self.network, self.embedding, self.output)
        if self.scale != 1.0:
            drafter.embedding = ScaledEmbedding(drafter.embedding, self.scale)
        return drafter

    def rows(self, text: TargetAnswer) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's inputs at all L tokens of a text.

        Returns:
            Embeddings (L, H); the target's features (L, layers * channels of each); which tokens are visual, (L,) bool.
        """
        context = text.context
        visual = context.visual[0]
        embeds = self.table(context.tokens[0]) * self.scale
        if self.network.config.projected and context.embeds is not None:
            embeds = torch.where(visual[:, None], context.embeds[0], embeds)
        features = torch.cat([context.features[layer][0] for layer in self.layers], -1)
        if self.late == "tokens":
            embeds, visual = embeds.roll(1, 0), visual.roll(1, 0)
        elif self.late == "features":
            features = features.roll(1, 0)
        return embeds, features, visual

    def positions(self, text: TargetAnswer, prompted: PromptInput) -> tuple[Tensor, int]:
        """Return the rotary positions of the prompt's M inputs to the network (M < P), and that of the first root.

        Args:
            prompted: Those M inputs.

        Returns:
            (1, M), or (1 or 3, 1, M) with one row for each axis of M-RoPE; and the root's position.
        """
        axes, positions = self.network.config.mrope_axes, text.context.positions
        if axes and len(positions) > 1:
            prompt_positions = positions[:axes, :, : text.prompt - 1]
            return prompt_positions if axes > 1 else prompt_positions[0], int(positions[..., text.prompt].amax()) - 1
        return prompted.positions[None], text.prompt - 1 if prompted.end is None else prompted.end


class ScaledEmbedding(nn.Module):
    """An embedding whose output is multiplied by a factor."""

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        self.embedding, self.scale = embedding, scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.scale


@torch.inference_mode()
def right_tokens(run: NetworkRun, text: TargetAnswer, depth: int) -> list[Tensor]:
    """Draft a chain after each root, which is a token of the answer, and compare it with the answer.

    Args:
        depth: Length of the chains.

    Returns:
        For each depth k from 1, (N + 1 - k,) bool: whether token k of each root's chain is right, if the drafter's
        input has the right tokens before it. There are fewer depths if the answer is shorter.
    """
    network, begin, count = run.network, text.prompt, text.positions
    prompted, embeds, hidden, past, columns = _run_to_roots(run, text)
    answer = torch.tensor(text.answer, device=embeds.device)
    hits: list[Tensor] = []
    for step in range(min(depth, count)):
        if step:
            # the chains after all roots at once: a chain attends to the text up to its root, and to itself
            states = _next_inputs(run, embeds[begin + step :], hidden[0, :-1], prompted)
            mask = _chain_mask(len(prompted.states), count, step, states)
            hidden, pair = network(states[None], columns[None, step:], past, mask)
            past = torch.cat([past[0], pair[0]], 2), torch.cat([past[1], pair[1]], 2)
        drafted = network.draft_vocabulary.token_ids(network.logits(hidden[0], run.output).argmax(-1))
        hits.append((drafted == answer[1 + step :]).cpu())
    return hits


def _run_to_roots(run: NetworkRun, text: TargetAnswer) -> tuple[PromptInput, Tensor, Tensor, KeyValues, Tensor]:
    """Run the network over a text.

    Returns:
        The network's inputs for the prompt; the embeddings (L, H); the states (1, N, H) from which the first tokens are
        drafted; keys and values of all tokens; the roots' positions (N,).
    """
    network, begin = run.network, text.prompt
    embeds, features, visual = run.rows(text)
    prompted = network.prompt(embeds[:begin], features[:begin], visual[:begin])
    positions, start = run.positions(text, prompted)
    past: KeyValues | None = None
    if len(prompted.states):
        _, past = network(prompted.states[None], positions)
    columns = torch.arange(start, start + text.positions, device=embeds.device)
    states = network.condition_on(prompted.condition).fuse(embeds[begin:], features[begin - 1 : -1])
    pair: KeyValues
    hidden, pair = network(states[None], columns[None], past)
    past = pair if past is None else (torch.cat([past[0], pair[0]], 2), torch.cat([past[1], pair[1]], 2))
    return prompted, embeds, hidden, past, columns


@torch.inference_mode()
def root_states(run: NetworkRun, text: TargetAnswer) -> Tensor:
    """Compute the network's states (N, H) from which the first token of each draft is predicted."""
    return _run_to_roots(run, text)[2][0]


@torch.inference_mode()
def token_surprisals(run: NetworkRun, text: TargetAnswer) -> Tensor:
    """Compute -log of the probability, in nats, that the drafter gives the text's next token.

    Returns:
        (n,), for the n <= N positions whose next token is in the draft vocabulary.
    """
    logits = run.network.logits(root_states(run, text), run.output).float()
    tokens = run.network.draft_vocabulary.all_token_ids(logits.device)
    answer = torch.tensor(text.answer[1:], device=logits.device)
    matches = (answer[:, None] == tokens).nonzero()  # (n, 2): place, and index in the draft vocabulary
    return -logits.log_softmax(-1)[matches[:, 0], matches[:, 1]].cpu()


def _next_inputs(run: NetworkRun, embeds: Tensor, hidden: Tensor, prompted: PromptInput) -> Tensor:
    """Compute the draft network's input (n, H) at the next token of n drafted chains.

    Args:
        embeds: (n, H) embeddings of the tokens.
        hidden: (n, H), the network's output at the tokens before them.
        prompted: The network's inputs for the prompt.
    """
    network = run.network.condition_on(prompted.condition)
    return network.chain_input(embeds, hidden, lambda token: run.table(token) * run.scale)


def _chain_mask(prompt: int, count: int, step: int, states: Tensor) -> Tensor:
    """Build the attention mask of the drafted chains at one step.

    Token number `step` of each of n chains sees the prompt, the answer up to the chain's root, and the chain's tokens.

    Args:
        prompt: Number of the network's inputs for the prompt.
        count: Number of the network's inputs for the answer.
        states: Gives dtype and device.

    Returns:
        Additive (1, 1, n, S), over the S tokens so far.
    """
    device, size = states.device, count - step
    roots = torch.arange(size, device=device)[:, None]
    parts = [torch.ones(size, prompt, dtype=torch.bool, device=device)]
    parts.append(torch.arange(count, device=device) <= roots)
    parts += [torch.arange(count - earlier, device=device) == roots for earlier in range(1, step + 1)]
    visible = torch.cat(parts, 1)
    return torch.zeros(visible.shape, dtype=states.dtype, device=device).masked_fill(~visible, -math.inf)[None, None]


def chain_rounds(right: Sequence[Tensor], length: int) -> int:
    """Count the rounds that decoding an answer takes with chains of `length` tokens.

    Args:
        right: `right[k]`: Bool for each root, whether token k + 1 of its chain is right.
    """
    lists = [depth.tolist() for depth in right]
    count = len(lists[0])
    root = rounds = 0
    while root < count:
        accepted = 0
        while accepted < min(length, count - root) and lists[accepted][root]:
            accepted += 1
        root, rounds = root + accepted + 1, rounds + 1
    return rounds


ExaminedModel = LoadedLanguageModel | LoadedVlm

BEGINNINGS = (  # for models without a chat template, which continue a text
    "Once upon a time, there was a little girl who",
    "The ship left the harbour at dawn, and the captain",
    "In the year 1900, the city of Paris",
    "To make bread, mix the flour with",
    "One day, Tom and his dog went to the park. They",
    "The most important difference between the two methods is",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "The cat sat by the window and looked at",
    "Water boils at a lower temperature on a mountain because",
    "Lily had a red ball. She liked to",
    "Chapter 1\n\nIt was a cold evening when",
    "The results of the experiment show that",
    "Mom said it was time to go to bed, but",
    "The first thing you should know about the moon is that",
    "There was a big tree in the garden. Under the tree",
)


@dataclass(frozen=True)
class DoctorPrompt:
    """One prompt.

    Args:
        system: The system message; "": none.
        images: The files of its pictures.
    """

    text: str
    system: str = ""
    images: tuple[Path, ...] = ()


def load_examined_model(
    model: str | os.PathLike[str], device: str | torch.device | None = None, dtype: torch.dtype = torch.float32
) -> ExaminedModel:
    """Load a language model with its tokenizer, or a model that reads images with its processor.

    Args:
        model: Name, folder or Hugging Face id.
    """
    folder = find_model(model, None, LANGUAGE_MODEL_FILES)
    if is_language_model(folder) and not is_vision_language_model(folder):
        return load_language_model(model, device, dtype)
    return load_vlm(model, device, dtype)


def built_in_prompts(chat: bool) -> list[DoctorPrompt]:
    """Return the prompts to use if no file is given.

    They are instructions if `chat`, for a model with a chat template, or beginnings of texts.
    """
    texts = [prompt.messages[0]["content"] for prompt in INSTRUCTIONS] if chat else BEGINNINGS
    return [DoctorPrompt(text) for text in texts]


def read_doctor_prompts(path: Path, limit: int | None) -> list[DoctorPrompt]:
    """Read the prompts of a file: .txt with one on each line, or .jsonl or .json of chats.

    A chat gives one prompt: its system message and first question. Later turns hold answers that are not the target's.

    Args:
        path: The file.
        limit: Take this many, evenly spaced; None: all.

    Raises:
        InputError: For a file in none of these formats, naming the line or row.
    """
    return [
        DoctorPrompt(chat.turns[0][0], str(chat.notes.get(SYSTEM_KEY, "")), chat.images)
        for chat in evenly_spaced(read_chats(path), limit)
    ]


def has_template(model: ExaminedModel) -> bool:
    """Return whether the model has a chat template."""
    return isinstance(model, LoadedVlm) or bool(getattr(model.tokenizer, "chat_template", None))


def make_inputs(model: ExaminedModel, prompt: DoctorPrompt, template: bool) -> dict[str, Any]:
    """Make the model's inputs for a prompt, a batch of one.

    Args:
        template: Whether the chat template is applied.

    Raises:
        InputError: If the prompt has pictures, but the model cannot read pictures.
    """
    if isinstance(model, LoadedVlm):
        return _vision_inputs(model, prompt, template)
    if prompt.images:
        raise InputError(
            f"`model` must read images for these prompts, but {type(model.model).__name__} does not. Leave `image` out."
        )
    tokenizer = model.tokenizer
    if template:
        messages = [{"role": "user", "content": prompt.text}]
        if prompt.system:
            messages.insert(0, {"role": "system", "content": prompt.system})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer("\n\n".join(text for text in (prompt.system, prompt.text) if text), return_tensors="pt")
    tensors: Mapping[str, Any] = inputs
    return {name: tensors[name].to(model.model.device) for name in ("input_ids", "attention_mask")}


def _vision_inputs(vlm: LoadedVlm, prompt: DoctorPrompt, template: bool) -> dict[str, Any]:
    question = read_question(prompt.images, prompt.text)
    texts = vlm.plain.hide([text for text in (prompt.system, prompt.text) if text])
    if template:
        messages = [user_message(question)]
        if prompt.system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": prompt.system}]})
        text = render_chat(vlm, messages)
    else:
        text = "\n".join([*(vlm.image_token for _ in prompt.images), *texts])
    return model_inputs(vlm, [text], [question])
