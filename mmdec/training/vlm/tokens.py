"""The small model's tokenizer and how a conversation is written in its tokens.

Runs of capitals are cut into single letters, and numbers into digits: with word pieces the model of a trial read digits
but no words.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END, PAD, IMAGE = "<s>", "</s>", "<pad>", "<image>"
USER, ASSISTANT = "USER:", "ASSISTANT:"
PRINTED = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:-"  # the first kinds of what a cell may show, from 1 on
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
    """Byte-level pieces learned from `texts`; `pieces` tokens in all."""
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
    """The one in `folder`, or one learned from `texts` and kept there."""
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        build_tokenizer(texts, pieces).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def prefix(patches: int) -> str:
    """What stands before the first question."""
    return f"{BEGIN}{USER} {IMAGE * patches}\n"


def asked(question: str) -> str:
    """A question as it is tokenized, after the prefix."""
    return f"{question} {ASSISTANT}"


def answered(answer: str) -> str:
    """An answer as it is tokenized, after its question."""
    return f" {answer}{END}"
