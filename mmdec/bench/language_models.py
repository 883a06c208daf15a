"""Times drafters for a given language model against transformers' assisted generation and prompt lookup.

Before any timing, each method answers each prompt once. If the tokens of one of mmdec's methods differ from those of
greedy `generate`, there is no report. A prompt on which the tokens of one of transformers' own methods differ is left
out of the comparison with this method, and counted. Then all methods run in turn, A B C D A B C D, prompt by prompt,
each by `model.generate` on the same token ids. Wall clock and processor time are those of the whole call.

The first tokens are also timed without statistics of earlier calls, as in a new process: there, mmdec has learned
nothing about the drafter and the machine yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from mmdec.bench.pairing import LOOKUP, PLAIN, Group, runnable_methods, task_groups, time_methods
from mmdec.bench.report import BenchReport, Exactness, Quantity
from mmdec.checks.arguments import check_threads, check_whole
from mmdec.checks.devices import check_device
from mmdec.core.loop import Round
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.timing import Stopwatch
from mmdec.drafters.registry import drafter_names, make_drafter
from mmdec.errors import InputError
from mmdec.evaluation.harness import (
    Harness,
    Log,
    Measurement,
    Measurements,
    Method,
    count_passes,
    no_log,
    transformers_errors_only,
)
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.hub.provenance import measurement_conditions
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.language_model import LoadedLanguageModel, load_language_model
from mmdec.tasks.threads import keep_threads
from mmdec.training.corpora.chats import SYSTEM_KEY, Conversation, read_chats
from mmdec.training.corpora.image_text import by_task
from mmdec.types import Drafter

SMALL, ASSISTED = "small model", "assisted generation"
FIRST_CALL_TOKENS = 20  # new tokens of a call without statistics of earlier calls, as in a new process
MIN_NEW_TOKENS = 8  # a prompt after which the model has positions for fewer new tokens is left out
MAX_NEW_TOKENS = 128


@final
@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as token ids."""

    task: str  # the kind of prompt
    ids: Tensor  # (1, P) the prompt's P token ids
    new_tokens: int  # maximum number of new tokens of the answer: the model has no positions for more


@final
class LanguageHarness(Harness[TokenPrompt]):
    """Answers encoded prompts with one language model, and measures the calls.

    Args:
        max_new_tokens: Maximum number of new tokens.
        afresh: Whether each call of mmdec starts without statistics of earlier calls.
    """

    what: ClassVar[str] = "prompt"
    clock: ClassVar[str] = "processor"  # this thread's seconds, which are steadier than the wall clock

    def __init__(
        self, language: LoadedLanguageModel, max_new_tokens: int = MAX_NEW_TOKENS, afresh: bool = False
    ) -> None:
        self.language, self.model, self.max_new_tokens, self.afresh = language, language.model, max_new_tokens, afresh
        self.statistics = DecodingStatistics()

    def measure(self, inputs: Sequence[TokenPrompt], method: Method) -> Measurement:
        """Answer one prompt, in a list, with this method, and measure it."""
        (prompt,) = inputs
        rounds: list[Round] = []
        options: dict[str, Any] = dict(method.options)
        if method.loop == "mmdec":
            statistics = DecodingStatistics() if self.afresh else self.statistics
            decoding = DecodingOptions(**options, statistics=statistics, on_round=rounds.append)
            options = {"custom_generate": Speculation(decoding)}
        # typed as `Any`, because type checkers take a module's attributes for tensors
        generate: Any = self.model.generate
        most = min(self.max_new_tokens, prompt.new_tokens)
        with ExitStack() as stack:
            stack.enter_context(transformers_errors_only())
            passes = stack.enter_context(count_passes(cast(Any, self.model).get_decoder()))
            mask = torch.ones_like(prompt.ids)
            stopwatch = Stopwatch(self.model.device)
            processor = stopwatch.cpu_time()
            generation = generate(prompt.ids, attention_mask=mask, do_sample=False, max_new_tokens=most, **options)
            wall, processor = stopwatch.lap(), stopwatch.cpu_time() - processor
        later = rounds[1:]
        return Measurement(
            tokens=generation[:, prompt.ids.shape[1] :].tolist(),
            texts=[],
            features=0.0,
            encoder=0.0,
            decoder=processor,
            drafter=sum(round_.drafter for round_ in rounds),
            total=wall,
            passes=len(passes),
            windows=1,  # number of encoder passes; by definition 1 for a model without a speech encoder
            rounds=len(later),
            drafted_tokens=sum(len(tokens) for round_ in later for tokens in round_.tokens),
            accepted=sum(sum(round_.accepted) for round_ in later),
        )


def bench_language(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    *,
    per_kind: int = 3,
    repeats: int = 5,
    max_new_tokens: int = MAX_NEW_TOKENS,
    device: str | None = "cpu",
    threads: int = 2,
    log: Log = no_log,
) -> BenchReport:
    """Time prompt lookup, recycling and a small model for a language model against transformers' own loops.

    Args:
        model: Directory or hub id of the language model.
        draft: Directory or hub id of a smaller model that drafts, or of a drafter for this model, such as EAGLE-3's.
        data: A file of prompts: .txt, one on each line, or .jsonl or .json of chats. None: built-in prompts, eight
            kinds of instruction for a model with a chat template, else beginnings of stories.
        per_kind: Number of prompts of each kind, evenly spaced.
        repeats: Timed answers of each method to each prompt.
        max_new_tokens: Maximum number of new tokens of an answer.

    Raises:
        InputError: If an argument is not valid.
        MmdecError: If mmdec's tokens differ from those of greedy decoding.
    """
    check_whole("per_kind", per_kind, 1, 2**31, "3 of each kind give a first impression.")
    check_whole("repeats", repeats, 1, 10_000, "5 give quartiles.")
    check_whole("max_new_tokens", max_new_tokens, MIN_NEW_TOKENS, 2**31, "Give 128.")
    check_threads(threads)
    torch_device = check_device(device)
    keep_threads(threads)
    language = load_language_model(model, torch_device)
    small, drafter = (None, None) if draft is None else _draft(draft, language)
    built_in = INSTRUCTIONS if language.tokenizer.chat_template else BEGINNINGS
    prompts_read = built_in if data is None else read_prompts(os.fspath(data))
    prompts, too_long = _encode_prompts(language, by_task(cast(Any, prompts_read), per_kind), max_new_tokens)
    ours, stock = _methods(language, small, drafter)
    harness = LanguageHarness(language, max_new_tokens)
    stock, left_out = runnable_methods(harness, prompts[0], stock)
    greedy = Method.greedy()
    methods = [ours[0], greedy, PLAIN, *ours[1:], *stock]
    log(f"{len(prompts)} prompts; methods: {', '.join(method.name for method in methods)}")
    singles = [[prompt] for prompt in prompts]
    timed = time_methods(harness, methods, singles, repeats, log)
    log(f"the first {FIRST_CALL_TOKENS} tokens of a first call")
    first = LanguageHarness(language, min(FIRST_CALL_TOKENS, max_new_tokens), afresh=True)
    interleaved = replace(timed, measured=first.interleave([*ours, greedy, PLAIN], singles, repeats, log))
    groups = task_groups([prompt.task for prompt in prompts])
    beginning = Group(f"first {FIRST_CALL_TOKENS} tokens", "all", range(len(prompts)))
    rows = timed.comparisons(ours, (greedy, *stock, PLAIN), groups)
    rows += interleaved.comparisons(ours, (greedy, PLAIN), [beginning])
    note = "" if not too_long else f", {too_long} left out, which are too long"
    return BenchReport(
        bench="core",
        title=f"Drafters for {language.directory.name}: {len(prompts)} prompts{note}, drafts learned",
        hardware=measurement_conditions(
            device=torch_device, dtype=torch.float32, batch=1, threads=torch.get_num_threads()
        ),
        exactness=tuple(
            Exactness(f"tokens of {name} and of transformers' greedy loop", sum(same), len(same))
            for name, same in timed.equal.items()
            if name != greedy.name
        ),
        comparisons=tuple(rows),
        quantities=tuple(_passes(timed.measured, method) for method in (*ours, *stock)),
        depths=timed.depths,
        not_measured=left_out,
        details={
            "what": "wall clock and the thread's processor time of whole calls; baseline over subject",
            "answers": [
                {"task": prompt.task, "tokens": len(runs[0].tokens[0])}
                for prompt, runs in zip(prompts, timed.measured[greedy.name], strict=True)
            ],
        },
    )


def _encode_prompts(
    language: LoadedLanguageModel, prompts: Sequence[Any], max_new_tokens: int
) -> tuple[list[TokenPrompt], int]:
    """Encode prompts as token ids.

    Args:
        max_new_tokens: Maximum number of new tokens of an answer.

    Returns:
        The encoded prompts, and the number of prompts that were too long for the model and are left out.

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
    return encoded, len(prompts) - len(encoded)


def _draft(
    draft: str | os.PathLike[str], language: LoadedLanguageModel
) -> tuple[LoadedLanguageModel | None, Drafter | None]:
    """Load what drafts: a smaller language model, or a draft network.

    Returns:
        (the model, None) or (None, the drafter).
    """
    try:
        return load_language_model(draft, language.model.device), None
    except InputError:  # the folder is not that of a language model, or it has no tokenizer
        return None, load_drafter(draft, language.model, "draft")


def _methods(
    language: LoadedLanguageModel, small: LoadedLanguageModel | None, drafter: Drafter | None
) -> tuple[list[Method], list[Method]]:
    """Make the methods to time.

    Args:
        small: A model that drafts.
        drafter: A draft network, for which transformers has no loop. None: there is none.

    Returns:
        The methods with mmdec's drafters, and those with transformers' own speculative loops.
    """
    ours = [Method.with_drafter(name, make_drafter(name)) for name in drafter_names()]
    stock = [LOOKUP]
    if small is not None:
        drafter = cast(Drafter, Speculation(DecodingOptions(small.model)).drafter_for(language.model))
        options: dict[str, Any] = {"assistant_model": small.model}
        if small.tokenizer.get_vocab() != language.tokenizer.get_vocab():
            options |= {"tokenizer": language.tokenizer, "assistant_tokenizer": small.tokenizer}
        ours.insert(0, Method.with_drafter(SMALL, drafter))
        stock.append(Method(ASSISTED, "transformers", options, (small.model,)))
    elif drafter is not None:
        ours.insert(0, Method.with_drafter(drafter.name, drafter))
    return ours, stock


def _passes(measured: Measurements, method: Method) -> Quantity:
    """Compute a method's tokens per pass of the model. The pass over the prompt and the token from it do not count."""
    runs = [repeats[0] for repeats in measured[method.name]]
    tokens = sum(len(run.tokens[0]) - 1 for run in runs)
    passes = sum(run.passes - 1 for run in runs)
    return Quantity(f"{method.name}: tokens of a pass of the model", tokens / max(passes, 1), "tokens", len(runs))


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
        """Make a chat from texts, which are messages of the user and the assistant in turn. The first text is the
        user's."""
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


def read_prompts(path: str | Path) -> list[ChatPrompt]:
    """Read prompts from a file: .txt with one on each line, or .jsonl or .json of chats.

    A prompt ends with its chat's last question. The prompt's kind is the row's field `category`, `task`, `topic` or
    `kind`.

    Raises:
        InputError: For a file that is missing, empty or in another format, naming the line.
    """
    return [_prompt(chat) for chat in read_chats(path)]


def _prompt(chat: Conversation) -> ChatPrompt:
    if chat.images:
        raise InputError(f"`data` must have no pictures, but {chat.place} has. Time it with `mmdec bench vlm`.")
    turns = [text for turn in chat.turns for text in turn][:-1]
    task = next((str(chat.notes[name]) for name in TASK_FIELDS if name in chat.notes), "all")
    prompt = ChatPrompt.from_turns(task, *turns)
    system = ({"role": SYSTEM_KEY, "content": str(chat.notes[SYSTEM_KEY])},) if SYSTEM_KEY in chat.notes else ()
    return ChatPrompt(task, (*system, *prompt.messages))
