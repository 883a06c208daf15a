"""The small vision-language model's tokenizer; conversations as token arrays on disk; and rows of packed questions.

A row has several questions about one picture, which is encoded once. Each question attends to the picture and to
itself, not to other questions. Words in capitals are split into letters, and numbers into digits: in a trial with word
pieces, the model learned to read digits but no words.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmdec.checks.files import write_whole
from mmdec.training.corpora.chats import Conversation

BEGIN, END, PAD, IMAGE = "<s>", "</s>", "<pad>", "<image>"
USER, ASSISTANT = "USER:", "ASSISTANT:"
# characters that may be printed in pictures; a cell's label is the index here plus 1
PRINTED = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:-"
LETTERS = r" ?[A-Z](?=[A-Z])|(?<=[A-Z])[A-Z]"
DIGITS = r" ?[0-9]"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}USER: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %} "
    "{% else %}ASSISTANT: {% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def build_tokenizer(texts: Iterable[str], pieces: int = 1024) -> PreTrainedTokenizerFast:
    """Learn a byte-level tokenizer from texts. pieces: vocabulary size, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LETTERS), "isolated"),
            pre_tokenizers.Split(Regex(DIGITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [
        AddedToken(BEGIN, special=True, normalized=False),
        AddedToken(END, special=True, normalized=False),
        AddedToken(PAD, special=True, normalized=False),
        AddedToken(IMAGE, special=True, normalized=False, rstrip=True),
        AddedToken(USER, special=True, normalized=False, rstrip=True),
        AddedToken(ASSISTANT, special=True, normalized=False, lstrip=True),
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        min_frequency=2,
        show_progress=False,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((text for text in texts), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def kept_tokenizer(folder: Path, texts: Iterable[str], pieces: int) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `folder`; if there is none, learn one from `texts` and save it there. pieces: vocabulary
    size."""
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        build_tokenizer(texts, pieces).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def prefix(patches: int) -> str:
    """Return the text before the first question, with one image token for each of the `patches` image patches."""
    return f"{BEGIN}{USER} {IMAGE * patches}\n"


def asked(question: str) -> str:
    """Write a question as it stands in a row: followed by the name of the assistant role, after which the answer
    comes."""
    return f"{question} {ASSISTANT}"


def answered(answer: str) -> str:
    """Write an answer as it stands after its question in a row: with the end token."""
    return f" {answer}{END}"


NOWHERE = 255  # in place of a patch index: no patch shows the token's character
FIELDS = ("tokens", "patches", "bounds", "first", "images")
# finds words in capitals and numbers, which may be printed in the picture
READ = re.compile(r"(?<![A-Za-z0-9])(?:[A-Z0-9][A-Z0-9.:-]*[A-Z0-9]|[0-9])(?![A-Za-z0-9])")


@dataclass(frozen=True)
class Encoded:
    """All N conversations as flat arrays. They have T turns in total; a turn is a question with its answer.

    tokens: token ids of all turns, one turn after the other.
    patches: for each token, the index of the image patch in which its character is printed; NOWHERE for question tokens
        and other answer tokens.
    bounds: (T, 2), indices into `tokens`: the end of each turn's question, and the end of its answer.
    first: (N + 1,), index of each conversation's first turn.
    images: path of each conversation's picture.
    """

    tokens: np.ndarray
    patches: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    images: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def turns(self, number: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return the turns of one conversation, each as (question tokens, answer tokens, patch index of each answer
        token or NOWHERE). number: index of the conversation."""
        turns = []
        for turn in range(self.first[number], self.first[number + 1]):
            begin = self.bounds[turn - 1, 1] if turn else 0
            middle, end = self.bounds[turn]
            turns.append((self.tokens[begin:middle], self.tokens[middle:end], self.patches[middle:end]))
        return turns

    def save(self, path: Path) -> None:
        """Write the arrays to the file `path`. If writing fails, an existing file stays as it was."""
        content = io.BytesIO()
        np.savez(content, **{name: getattr(self, name) for name in FIELDS})
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Encoded:
        """Read a file that `save` wrote."""
        with np.load(path, allow_pickle=False) as kept:
            return cls(*(kept[name] for name in FIELDS))


def encode(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Encode all turns of conversations as tokens, and find for each answer token the image patch where its character
    is printed."""
    tokens: list[np.ndarray] = []
    patches: list[np.ndarray] = []
    bounds: list[tuple[int, int]] = []
    first, end = [0], 0
    for conversation in conversations:
        texts = [text for question, answer in conversation.turns for text in (asked(question), answered(answer))]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        prints = conversation.notes.get("prints", [])
        for number in range(0, len(texts), 2):
            question, answer = encoded["input_ids"][number : number + 2]
            tokens += [np.asarray(question, np.uint16), np.asarray(answer, np.uint16)]
            read = patches_read(texts[number + 1], encoded["offset_mapping"][number + 1], prints)
            patches += [np.full(len(question), NOWHERE, np.uint8), read]
            bounds.append((end + len(question), end + len(question) + len(answer)))
            end = bounds[-1][1]
        first.append(len(bounds))
    images = np.array([str(conversation.images[0]) for conversation in conversations])
    ends = np.array(bounds, np.int64)
    return Encoded(np.concatenate(tokens), np.concatenate(patches), ends, np.array(first, np.int64), images)


def patches_read(
    answer: str, offsets: Sequence[tuple[int, int]], prints: Sequence[tuple[str, Sequence[int]]]
) -> np.ndarray:
    """Find for each token of an answer the image patch in which its character is printed; NOWHERE if there is none.

    offsets: (begin, end) of each token in `answer`. prints: the texts printed in the picture, each with the patch index
        of each character.
    A word or number that is printed twice gets no patches, because the answer may mean either. Returns: (tokens,)
    uint8.
    """
    where: dict[int, int] = {}
    for word in READ.finditer(answer):
        printed = [
            patches[match.start() : match.end()]
            for text, patches in prints
            for match in re.finditer(rf"(?<![A-Z0-9]){re.escape(word[0])}(?![A-Z0-9])", text)
        ]
        if len(printed) == 1:
            where |= dict(zip(range(word.start(), word.end()), printed[0], strict=True))
    read = [where.get(begin + (answer[begin : begin + 1] == " "), -1) for begin, _ in offsets]
    return np.array([NOWHERE if patch < 0 else patch for patch in read], np.uint8)


IGNORED = -100  # label of positions without a loss (the default `ignore_index` of torch's cross-entropy)
MASKED = -1e4  # added to the attention scores of tokens that must not be attended to


@dataclass
class Batch:
    """A batch of B rows of L tokens, each row with one picture and several packed questions.

    pixels: (B, 3, H, W) uint8. tokens: (B, L), token ids. positions: (B, L), position ids; the ids of each question
        begin right after the ids of the picture.
    labels: (B, L), the next token if it belongs to an answer, else IGNORED.
    turns: (B, L), 0 for the text before the first question, then the number of the question from 1; -1 for padding.
    patches: (B, L) uint8, index of the image patch in which the next token's character is printed; NOWHERE if there is
        none.
    cells: (B, P, cells, labels) uint8, labels of what each cell of each of the P image patches shows; 0: nothing.
    """

    pixels: Tensor
    tokens: Tensor
    labels: Tensor
    turns: Tensor
    positions: Tensor
    patches: Tensor
    cells: Tensor

    @property
    def rows(self) -> Tensor:
        return self.tokens


def pack(
    prefix: np.ndarray, turns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], length: int, pad: int
) -> tuple[np.ndarray, ...]:
    """Pack as many turns as fit into one row.

    prefix: tokens before the first question. turns: each as (question tokens, answer tokens, patch indices), as from
        `Encoded.turns`. length: number of tokens in the row. pad: id of the padding token.
    Returns: tokens, labels (the next token if it belongs to an answer, else IGNORED), turns (number of each token's
        question), positions and patches, each (length,). The positions of each turn begin right after the prefix.
    """
    tokens = np.full(length, pad, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    owners = np.full(length, -1, np.int64)
    positions = np.zeros(length, np.int64)
    patches = np.full(length, NOWHERE, np.uint8)
    end = len(prefix)
    tokens[:end], owners[:end], positions[:end] = prefix, 0, np.arange(end)
    number = 0
    for question, answer, read in turns:
        size = len(question) + len(answer)
        if end + size > length:
            continue
        number += 1
        begin, answer_at, stop = end, end + len(question), end + size
        tokens[begin:answer_at], tokens[answer_at:stop] = question, answer
        labels[answer_at - 1 : stop - 1], patches[answer_at - 1 : stop - 1] = answer, read
        owners[begin:stop] = number
        positions[begin:stop] = len(prefix) + np.arange(size)
        end = stop
    return tokens, labels, owners, positions, patches


def turn_mask(turns: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the additive attention mask (B, 1, L, L): 0 where a token may attend (to the prefix and to its own turn,
    not to later tokens), else MASKED.

    turns: (B, L), number of each token's question; 0: prefix, -1: padding.
    """
    same = turns[:, :, None] == turns[:, None, :]
    prefix = (turns == 0)[:, None, :] & (turns >= 0)[:, :, None]
    length = turns.shape[1]
    back = torch.ones(length, length, dtype=torch.bool, device=turns.device).tril()
    return torch.where((same | prefix) & back, 0.0, MASKED).to(dtype)[:, None]
