"""The prompts of `mmdec bench drafters` for language models: built in, or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmdec.bench.options import MIN_NEW_TOKENS
from mmdec.errors import InputError
from mmdec.evaluation.language_model import TokenPrompt
from mmdec.pretrained.language_model import LoadedLanguageModel
from mmdec.training.corpora.chats import SYSTEM_KEY, Conversation, read_chats

# names of fields in the file that may hold a prompt's kind; the first one that exists is used
TASK_FIELDS = ("category", "task", "topic", "kind")

Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt: a chat that ends with the user's message. Models without a chat template continue that message."""

    task: str  # the kind of prompt, by which results are grouped
    messages: tuple[Message, ...]

    @classmethod
    def from_turns(cls, task: str, *texts: str) -> ChatPrompt:
        """Make a chat from texts, which are messages of the user and the assistant in turn.

        The first text is the user's.
        """
        roles = ("user", "assistant")
        return cls(task, tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(texts)))


NOTE = (
    "The library in Mill Street opens at nine and closes at six. On Saturdays it closes at noon. You may borrow five "
    "books for three weeks. If nobody waits for a book, you may keep it for three weeks more. A lost book costs its "
    "price and two pounds."
)
LETTER = (
    "Dear Mr Hall, thank you for your order of twelve garden chairs. Ten of them left our store on Monday. The other "
    "two are not ready, because the paint is still wet. We will send them next week, and you will pay nothing for the "
    "second delivery. We are sorry for the delay. Yours, Anna Reed"
)
REPORT = (
    "The bridge over the Tarn was built in 1898. It is 74 metres long and has three arches of red stone. In 1930 a "
    "flood carried away the middle arch, and it was rebuilt in concrete. Since 2011 cars may not cross it. Every "
    "spring divers look at its piers. "
    "This year they found two cracks, each as wide as a finger, under the northern pier."
)
CODE = """def total(prices, rate):
    result = 0
    for price in prices:
        result = result + price
    return result * rate


def mean(prices):
    return total(prices, 1) / len(prices)
"""
LOOP = """function countWords(text) {
  var words = text.split(" ");
  var counts = {};
  for (var i = 0; i < words.length; i++) {
    var word = words[i];
    counts[word] = (counts[word] || 0) + 1;
  }
  return counts;
}
"""
PEOPLE = "Ada Moss, 34, baker in York. Ben Frost, 51, nurse in Leeds. Cora Lind, 28, driver in Hull."

INSTRUCTIONS = (
    ChatPrompt.from_turns("rewriting", f"Correct the spelling of this text, and change nothing else:\n\n{NOTE}"),
    ChatPrompt.from_turns("rewriting", f"Write this letter again with the name Mrs Stone for Mr Hall:\n\n{LETTER}"),
    ChatPrompt.from_turns("rewriting", f"Repeat this text word for word:\n\n{REPORT}"),
    ChatPrompt.from_turns("summary", f"Summarise this text in two sentences:\n\n{REPORT}"),
    ChatPrompt.from_turns("summary", f"What does this letter say? Answer in two sentences.\n\n{LETTER}"),
    ChatPrompt.from_turns("summary", f"Give the main points of this note:\n\n{NOTE}"),
    ChatPrompt.from_turns("code edit", f"Rename `prices` to `amounts` in this code:\n\n```python\n{CODE}```"),
    ChatPrompt.from_turns("code edit", f"Use let and const for var in this code:\n\n```javascript\n{LOOP}```"),
    ChatPrompt.from_turns("code edit", f"Add a docstring to each function:\n\n```python\n{CODE}```"),
    ChatPrompt.from_turns("quoted passage", f"Quote the sentences about the flood, then explain them:\n\n{REPORT}"),
    ChatPrompt.from_turns("quoted passage", f"Which sentence names a price? Quote it and explain it.\n\n{NOTE}"),
    ChatPrompt.from_turns("quoted passage", f"Quote what the letter says about the two chairs:\n\n{LETTER}"),
    ChatPrompt.from_turns("list", "List ten animals that live in the sea, one on each line."),
    ChatPrompt.from_turns("list", "List the months of the year, each with the number of its days."),
    ChatPrompt.from_turns("list", "Name eight things to pack for a week in the mountains, and say why."),
    ChatPrompt.from_turns(
        "chat, third turn",
        "I want to grow tomatoes on my balcony.",
        "Choose a sunny place, a deep pot and good soil. Water the plants every morning.",
        "How much water do they need?",
        "About one litre a day for each plant, and two on hot days.",
        "And what should I do if the leaves turn yellow?",
    ),
    ChatPrompt.from_turns(
        "chat, third turn",
        "What is a prime number?",
        "A whole number above 1 that only 1 and itself divide.",
        "Is 21 prime?",
        "No: 3 times 7 is 21.",
        "List the prime numbers below 30, and say how you found them.",
    ),
    ChatPrompt.from_turns(
        "chat, third turn",
        "Plan a day in Paris for me.",
        "Morning: the Louvre. Noon: lunch by the river. Afternoon: the Eiffel Tower.",
        "I do not like museums.",
        "Then walk through the gardens of the Tuileries in the morning.",
        "Good. Write the whole plan again, with times.",
    ),
    ChatPrompt.from_turns("JSON", f"Write these people as a JSON list with name, age, job and town:\n\n{PEOPLE}"),
    ChatPrompt.from_turns("JSON", "Write a JSON object with the names and capitals of five countries."),
    ChatPrompt.from_turns("JSON", f"Write this note's rules as JSON with opening hours and fees:\n\n{NOTE}"),
    ChatPrompt.from_turns("open question", "Why is the sky blue? Explain it to a child."),
    ChatPrompt.from_turns("open question", "Tell a short story about a lighthouse keeper and a lost dog."),
    ChatPrompt.from_turns("open question", "What are the advantages and disadvantages of living in a big city?"),
)
BEGINNINGS = (  # short, in plain letters, because small models of stories have few positions and characters
    ChatPrompt.from_turns("story", "Once upon a time, there was a little girl named Lily."),
    ChatPrompt.from_turns("story", "One day, a boy named Tim went to the park with his mom."),
    ChatPrompt.from_turns("story", "The big brown bear was very hungry."),
    ChatPrompt.from_turns("dialogue", 'Tom said, "Can I play with your ball?" Sue said, "'),
    ChatPrompt.from_turns("dialogue", '"What is in the box?" asked Ben. His dad said, "'),
    ChatPrompt.from_turns("dialogue", '"Do not go there!" said the old cat. "'),
    ChatPrompt.from_turns("repetition", "The cat ran and ran. The dog ran and ran. The cat ran and"),
    ChatPrompt.from_turns("repetition", "Lily had a red ball. Tim had a red ball. Sue had a red ball. Ben had"),
    ChatPrompt.from_turns("repetition", "Row, row, row the boat. Row, row, row the"),
)


def read_chat_prompts(path: str | Path) -> list[ChatPrompt]:
    """Read prompts from a file: .txt with one on each line, or .jsonl or .json of chats.

    A prompt ends with its chat's last question. The prompt's kind is the row's field `category`, `task`, `topic` or
    `kind`.

    Raises:
        InputError: For a file that is missing, empty or in another format, naming the line.
    """
    return [_prompt(chat) for chat in read_chats(path)]


def _prompt(chat: Conversation) -> ChatPrompt:
    if chat.images:
        raise InputError(f"`data` must have no pictures, but {chat.place} has. Give a model that sees, or `--images`.")
    turns = [text for turn in chat.turns for text in turn][:-1]
    task = next((str(chat.notes[name]) for name in TASK_FIELDS if name in chat.notes), "all")
    prompt = ChatPrompt.from_turns(task, *turns)
    system = ({"role": SYSTEM_KEY, "content": str(chat.notes[SYSTEM_KEY])},) if SYSTEM_KEY in chat.notes else ()
    return ChatPrompt(task, (*system, *prompt.messages))


def encode_prompts(
    language: LoadedLanguageModel, prompts: Sequence[ChatPrompt], max_new_tokens: int
) -> list[TokenPrompt]:
    """Encode prompts as token ids. Those that are too long for the model are left out.

    Args:
        language: The model that answers; its chat template is used if it has one.
        prompts: The prompts.
        max_new_tokens: Maximum number of new tokens of an answer.

    Raises:
        InputError: If all prompts are too long.
    """
    tokenizer, config = language.tokenizer, language.model.config
    positions = getattr(config, "max_position_embeddings", None)
    encoded: list[TokenPrompt] = []
    for prompt in prompts:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template([*prompt.messages], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt.messages[-1]["content"], return_tensors="pt")["input_ids"]
        room = max_new_tokens if positions is None else min(max_new_tokens, positions - ids.shape[1])
        if room >= MIN_NEW_TOKENS and ids.shape[1]:
            encoded.append(TokenPrompt(prompt.task, ids.to(language.model.device), room))
    if not encoded:
        raise InputError(
            f"`data` must hold prompts that leave {MIN_NEW_TOKENS} of the model's {positions} positions for an answer, "
            "but has none. Shorten them."
        )
    return encoded
