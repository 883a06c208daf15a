"""The small vision-language model's tokenizer; conversations as tokens in flat arrays on disk; and packed rows of them.

A row has several questions about one picture. The picture is encoded once. Each question attends to the picture and to
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
PRINTED = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:-"  # characters printed in pictures; labels of cells: 1, 2, ...
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
    """Learn a tokenizer with byte-level pieces from `texts`. pieces: number of tokens, special ones included."""
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
    """Load the tokenizer in `folder`, or learn one from `texts` and save it there."""
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        build_tokenizer(texts, pieces).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def prefix(patches: int) -> str:
    """Return the text before the first question. It has an image token for each of `patches` patches."""
    return f"{BEGIN}{USER} {IMAGE * patches}\n"


def asked(question: str) -> str:
    """Return a question in the form in which it follows `prefix`."""
    return f"{question} {ASSISTANT}"


def answered(answer: str) -> str:
    """Return an answer in the form in which it follows its question."""
    return f" {answer}{END}"


NOWHERE = 255  # stands for a patch's number if no patch shows the token's character
FIELDS = ("tokens", "patches", "bounds", "first", "images")
READ = re.compile(r"(?<![A-Za-z0-9])(?:[A-Z0-9][A-Z0-9.:-]*[A-Z0-9]|[0-9])(?![A-Za-z0-9])")  # a printed word or number


@dataclass(frozen=True)
class Encoded:
    """All N conversations with T turns, a question and its answer each, as flat arrays.

    tokens: the tokens of all turns, one turn after the other.
    patches: for each token, the patch that shows its printed character, if it is an answer's; else NOWHERE.
    bounds: (T, 2) the end of the question and of the answer of each turn, as indices into `tokens`.
    first: (N + 1,) the first turn of each conversation.
    images: the image path of each conversation.
    """

    tokens: np.ndarray
    patches: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    images: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def turns(self, number: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return for each turn of conversation `number`: the question's tokens, the answer's tokens, and the patch that
        shows each answer token."""
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
    """Encode all turns, in the form in which they follow the text of `prefix`, and find the patches of printed text."""
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
    """Find for each token of an answer the patch where its character is printed; NOWHERE if there is none.

    offsets: begin and end of each token in the answer. prints: printed texts, each with the patch of each character. A
        word or number that is printed twice is left out, because the answer may mean either.
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


IGNORED = -100  # label of positions that do not count in the loss: torch's default
MASKED = -1e4  # added to the attention scores of tokens that must not be seen


@dataclass
class Batch:
    """A batch of B rows of L tokens, one picture in each row.

    pixels: (B, 3, H, W) uint8. tokens, positions: (B, L). labels: (B, L) the next token if it is an answer's, else
        IGNORED.
    turns: (B, L) 0 for the picture's prefix, then the number of the question; -1 for padding.
    patches: (B, L) uint8, the patch that shows the next token, see `Encoded`.
    cells: (B, P, cells, labels) uint8, what each cell of each image patch shows.
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
    """Pack turns, as many as fit, into one row. Returns tokens, labels, turns, positions and patches, each (length,).

    prefix: tokens before the first question. turns: as from `Encoded.turns`. pad: token for the rest. Each turn's
    positions begin right after the prefix.
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
    """Return the attention mask (B, 1, L, L) of rows: 0 for earlier tokens of the prefix and of the same turn, else
    MASKED. turns: (B, L), see `Batch`."""
    same = turns[:, :, None] == turns[:, None, :]
    prefix = (turns == 0)[:, None, :] & (turns >= 0)[:, :, None]
    length = turns.shape[1]
    back = torch.ones(length, length, dtype=torch.bool, device=turns.device).tril()
    return torch.where((same | prefix) & back, 0.0, MASKED).to(dtype)[:, None]
