"""Prompts to time language models on: eight kinds for models that answer, three for models that only continue, or a
file of one's own.

Kinds matter more than their number: prompt lookup copies from a prompt that the answer repeats, and guesses elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmdec.training.corpora.chats import SYSTEM, Conversation, read_chats
from mmdec.types import InputError

KINDS = ("category", "task", "topic", "kind")  # fields of a row with the kind of its prompt

Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True)
class TextPrompt:
    """A prompt: a chat that ends with the user's message. A model without a chat template continues the last one."""

    task: str  # results are grouped by it
    messages: tuple[Message, ...]

    @classmethod
    def asked(cls, task: str, *texts: str) -> TextPrompt:
        """A chat of texts in turn, the user's first."""
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
    TextPrompt.asked("rewriting", f"Correct the spelling of this text, and change nothing else:\n\n{NOTE}"),
    TextPrompt.asked("rewriting", f"Write this letter again with the name Mrs Stone for Mr Hall:\n\n{LETTER}"),
    TextPrompt.asked("rewriting", f"Repeat this text word for word:\n\n{REPORT}"),
    TextPrompt.asked("summary", f"Summarise this text in two sentences:\n\n{REPORT}"),
    TextPrompt.asked("summary", f"What does this letter say? Answer in two sentences.\n\n{LETTER}"),
    TextPrompt.asked("summary", f"Give the main points of this note:\n\n{NOTE}"),
    TextPrompt.asked("code edit", f"Rename `prices` to `amounts` in this code:\n\n```python\n{CODE}```"),
    TextPrompt.asked("code edit", f"Use let and const for var in this code:\n\n```javascript\n{LOOP}```"),
    TextPrompt.asked("code edit", f"Add a docstring to each function:\n\n```python\n{CODE}```"),
    TextPrompt.asked("quoted passage", f"Quote the sentences about the flood, then explain them:\n\n{REPORT}"),
    TextPrompt.asked("quoted passage", f"Which sentence names a price? Quote it and explain it.\n\n{NOTE}"),
    TextPrompt.asked("quoted passage", f"Quote what the letter says about the two chairs:\n\n{LETTER}"),
    TextPrompt.asked("list", "List ten animals that live in the sea, one on each line."),
    TextPrompt.asked("list", "List the months of the year, each with the number of its days."),
    TextPrompt.asked("list", "Name eight things to pack for a week in the mountains, and say why."),
    TextPrompt.asked(
        "chat, third turn",
        "I want to grow tomatoes on my balcony.",
        "Choose a sunny place, a deep pot and good soil. Water the plants every morning.",
        "How much water do they need?",
        "About one litre a day for each plant, and two on hot days.",
        "And what should I do if the leaves turn yellow?",
    ),
    TextPrompt.asked(
        "chat, third turn",
        "What is a prime number?",
        "A whole number above 1 that only 1 and itself divide.",
        "Is 21 prime?",
        "No: 3 times 7 is 21.",
        "List the prime numbers below 30, and say how you found them.",
    ),
    TextPrompt.asked(
        "chat, third turn",
        "Plan a day in Paris for me.",
        "Morning: the Louvre. Noon: lunch by the river. Afternoon: the Eiffel Tower.",
        "I do not like museums.",
        "Then walk through the gardens of the Tuileries in the morning.",
        "Good. Write the whole plan again, with times.",
    ),
    TextPrompt.asked("JSON", f"Write these people as a JSON list with name, age, job and town:\n\n{PEOPLE}"),
    TextPrompt.asked("JSON", "Write a JSON object with the names and capitals of five countries."),
    TextPrompt.asked("JSON", f"Write this note's rules as JSON with opening hours and fees:\n\n{NOTE}"),
    TextPrompt.asked("open question", "Why is the sky blue? Explain it to a child."),
    TextPrompt.asked("open question", "Tell a short story about a lighthouse keeper and a lost dog."),
    TextPrompt.asked("open question", "What are the advantages and disadvantages of living in a big city?"),
)
BEGINNINGS = (  # short, in plain letters: small models of stories have few positions and characters
    TextPrompt.asked("story", "Once upon a time, there was a little girl named Lily."),
    TextPrompt.asked("story", "One day, a boy named Tim went to the park with his mom."),
    TextPrompt.asked("story", "The big brown bear was very hungry."),
    TextPrompt.asked("dialogue", 'Tom said, "Can I play with your ball?" Sue said, "'),
    TextPrompt.asked("dialogue", '"What is in the box?" asked Ben. His dad said, "'),
    TextPrompt.asked("dialogue", '"Do not go there!" said the old cat. "'),
    TextPrompt.asked("repetition", "The cat ran and ran. The dog ran and ran. The cat ran and"),
    TextPrompt.asked("repetition", "Lily had a red ball. Tim had a red ball. Sue had a red ball. Ben had"),
    TextPrompt.asked("repetition", "Row, row, row the boat. Row, row, row the"),
)


def read_prompts(path: str | Path) -> list[TextPrompt]:
    """The prompts of a file, see `read_chats`: a chat is answered after its last question, its kind is the row's
    `category`, `task`, `topic` or `kind`.

    Raises: InputError for a file that is missing, empty or in another format, naming the line.
    """
    return [_prompt(chat) for chat in read_chats(path)]


def _prompt(chat: Conversation) -> TextPrompt:
    if chat.images:
        raise InputError(f"`data` must have no pictures, but {chat.place} has. Time it with `mmdec bench vlm`.")
    said = [text for turn in chat.turns for text in turn][:-1]
    task = next((str(chat.notes[name]) for name in KINDS if name in chat.notes), "all")
    prompt = TextPrompt.asked(task, *said)
    system = ({"role": SYSTEM, "content": str(chat.notes[SYSTEM])},) if SYSTEM in chat.notes else ()
    return TextPrompt(task, (*system, *prompt.messages))
