"""Random tests of every public call and of the command line with odd arguments, from a seed.

A call may only raise mmdec's errors (InputError, BatchError; TypeError for an unknown keyword). No call may take long,
and each must give the same result twice. All 1,500 cases with MMDEC_ALL=1, else a share of them.
"""

from __future__ import annotations

import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.compat import CACHE_ARGUMENT
from mmdec.daspeech.translate import load_translator
from mmdec.drafters.medusa.checkpoint import load_heads
from mmdec.errors import MmdecError
from mmdec.whisper.checkpoint import load_whisper
from tests.conftest import RATE, buzz
from tests.fuzz.odd_values import FRESH, PLAIN, WORDS
from tests.support.grid import WHOLE
from tests.support.tiny_english import write_english
from tests.support.tiny_text import language_model
from tests.support.tiny_whisper import write

CALLS, GROUPS = (1500, 15) if WHOLE else (80, 4)
SECONDS, HANGS = 20, 300  # of the processor, and on a clock, after which a call counts as never ending
UNSEEDED = ("typical", "residual", "traversal")  # their texts depend on the drafts, and these on what passes cost
Good = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Door:
    """A public call, arguments that it takes, and values for some parameters beside those that fit nowhere."""

    call: Callable[..., Any]
    good: Good
    more: tuple[str, ...] = ()  # parameters that `good` leaves out
    apt: Mapping[str, tuple[Any, ...]] | None = None  # drawn as often as the odd ones


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Return two tiny models, a recording and a corpus, by short names."""
    place = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(tiny_model, place / "translator")
    write(place / "whisper")
    mmdec.audio.save_audio(place / "sound.wav", buzz(0.5))
    write_english(place / "english")
    return place


@pytest.fixture(scope="module")
def entry_points(folder: Path) -> dict[str, Door]:
    model, small, whisper = language_model(), language_model(seed=1), load_whisper(folder / "whisper", "cpu")
    translator = load_translator(folder / "translator", "cpu")
    ids, sound = torch.tensor([[1, 2, 3, 1, 2, 3]]), buzz(0.5)
    spoken = mmdec.translate_speech(sound, sample_rate=RATE, model=translator)
    written = mmdec.transcribe(sound, sample_rate=RATE, model=whisper, drafter=None, max_new_tokens=4)
    models = (model, whisper, whisper.model, translator, LlamaForCausalLM, "whisper", "translator", folder / "whisper")
    drafting = {
        "drafter": (small, *models, "lookup", "recycling", language_model(seed=2, vocab_size=90)),
        "rule": ("greedy", "sampled", *UNSEEDED),
        "num_speculative_tokens": (0, 3, (6, 2), 10**6),
    }
    numbers = {"max_new_tokens": (1, 4), "temperature": (0.5, 100.0), "do_sample": (True,), "top_k": (1, 10**9)}
    options = (*numbers, "top_p", "repetition_penalty", "stop_strings", "logits_processor", "stopping_criteria")
    options = (*options, "return_dict_in_generate", "num_beams", "num_return_sequences", "nonsense")
    speech = {"audio": sound, "sample_rate": RATE}
    heard = ("processor", "timestamps", "language", "task", "prompt", "batch_size", "rule", "num_speculative_tokens")
    heard = (*heard, "seed", "device", "threads", "progress", "logprob_threshold", "no_speech_threshold")
    heard = (*heard, "prompt_condition_type", "compression_ratio_threshold", "condition_on_prev_tokens")
    sounds = {"audio": (folder / "sound.wav", [sound, sound], sound), "model": models, "threads": (1, 2)}

    def generate(**given: Any) -> Any:
        return mmdec.generate(**{"max_new_tokens": 4, **given})

    def stream(**given: Any) -> Any:
        return list(islice(mmdec.stream(**{"max_new_tokens": 4, **given}), 40))

    def speculate(**given: Any) -> Any:
        return model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=mmdec.speculate(**given))

    text = {"model": model, "inputs": ids, "drafter": "lookup", "rule": None, "num_speculative_tokens": 3, "seed": 1}
    texts = {**drafting, **numbers, "model": models}
    plug = ("on_round", "streamer", "nonsense")
    return {
        "translate_speech": Door(
            mmdec.translate_speech,
            lambda: {**speech, "model": translator},
            ("strategy", "device", "threads", "vocoder", "nonsense"),
            {**sounds, "strategy": ("verified", "viterbi"), "device": ("cpu",), "vocoder": ("no/where",)},
        ),
        "transcribe": Door(
            mmdec.transcribe,
            lambda: {**speech, "model": whisper, "drafter": "lookup", "max_new_tokens": 4},
            (*heard, *options),
            {**sounds, **drafting, **numbers, "timestamps": ("word", "segment"), "processor": (whisper.processor,)},
        ),
        "generate": Door(generate, lambda: text, (*options, "attention_mask", "position_ids", CACHE_ARGUMENT), texts),
        "stream": Door(stream, lambda: text, ("tokenizer", *options), texts),
        "speculate": Door(speculate, lambda: {**text} | {"drafter": "lookup"}, plug, drafting),
        "load": Door(mmdec.load, lambda: {"model": folder / "translator"}, ("device", "vocoder"), {"model": models}),
        "load_whisper": Door(load_whisper, lambda: {"model": folder / "whisper"}, ("device",), {"model": models}),
        "load_heads": Door(
            load_heads, lambda: {"directory": folder / "whisper/medusa", "model": whisper.model}, (), {"model": models}
        ),
        "load_audio": Door(mmdec.audio.load_audio, lambda: {"source": folder / "sound.wav"}, ("sample_rate",)),
        "save_audio": Door(
            mmdec.audio.save_audio,
            lambda: {"path": "x.wav", "samples": sound},
            ("sample_rate",),
            {"path": ("y.flac",)},
        ),
        "save": Door(spoken.save, lambda: {"path": "x.wav"}, (), {"path": ("a/b.flac", "x.txt")}),
        "format": Door(written.format, lambda: {"kind": "text"}, (), {"kind": ("json", "srt")}),
    }


# and their options; a command of the second half runs only if it is refused
SUBCOMMANDS: dict[str, tuple[str, ...]] = {
    "translate sound.wav -o out -m translator": ("--strategy", "--vocoder", "--device", "--threads", "--model", "-o"),
    "transcribe sound.wav -m whisper -d lookup": (
        *("-o", "--format", "--timestamps", "--model", "--drafter", "--language", "--task", "--prompt", "--batch-size"),
        *("--temperature", "--logprob-threshold", "--compression-ratio-threshold", "--no-speech-threshold", "--device"),
        *("--threads",),
    ),
    "eval asr --corpus english --split dev -m whisper --limit 1 --no-plain --max-new-tokens 4": (
        *("--split", "--corpus", "--heads", "--plan", "--language", "--batch-size", "--limit", "--worst", "--device"),
        *("--threads", "--output"),
    ),
    "eval speech --corpus nowhere --no-asr -m translator": (
        "--split",
        "--strategy",
        "--limit",
        "--device",
        "--threads",
        "--cvss",
    ),
    "convert medusa whisper": ("",),
    "convert hifigan sound.wav": ("",),
    "convert daspeech published": ("",),
    "bench speech nowhere.wav": ("--repeats", "--threads", "--device"),
    "bench drafters --audio nowhere.wav -m whisper": ("--repeats", "--threads", "--device", "--plan", "--drafter"),
}
REFUSED: dict[str, tuple[tuple[str, str], ...]] = dict.fromkeys(
    ("bench kernels",),
    (("--threads", "1000000000"), ("--repeats", "0"), ("--repeats", "x"), ("--device", "tpu"), ("--no", "1")),
) | {
    "train drafter --model none --data none.txt --output out": tuple(
        ("--minutes", bad) for bad in ("nan", "inf", "-inf", "1e308", "0", "-1", "x", "")
    ),
    "demo": tuple(("--port", bad) for bad in ("0", "-1", "99999", "x", "nan", "")),
}


def drawn_call(seed: str, entry_points: dict[str, Door]) -> tuple[Callable[[], Any], str, bool]:
    """Return one call with odd arguments, in words too, and whether its text is its own."""
    rng = random.Random(seed)
    if rng.random() < 0.25:
        return command(rng)
    name = rng.choice(sorted(entry_points))
    entry_point = entry_points[name]
    given = dict(entry_point.good())
    if name == "speculate":
        del given["model"], given["inputs"]
    for parameter in rng.sample(
        [*given, *entry_point.more], min(rng.choice((1, 1, 2, 3)), len(given) + len(entry_point.more))
    ):
        apt = (entry_point.apt or {}).get(parameter, ())
        if apt and rng.random() < 0.4:
            given[parameter] = rng.choice(apt)
        else:
            given[parameter] = rng.choice(PLAIN) if rng.random() < 0.5 else rng.choice(FRESH)()
    if parameter_is_work(given):
        given["max_new_tokens"] = 4
    own = not (isinstance(given.get("rule"), str) and given["rule"] in UNSEEDED)
    return (
        lambda: entry_point.call(**given),
        f"{name}({', '.join(f'{key}={kind(value)}' for key, value in given.items())})",
        own,
    )


def parameter_is_work(given: Mapping[str, Any]) -> bool:
    """Whether it asks for a text without end: to write it is no fault."""
    most = given.get("max_new_tokens", 0)
    return most is None or (isinstance(most, (int, float)) and most > 100)


def command(rng: random.Random) -> tuple[Callable[[], Any], str, bool]:
    if rng.random() < 0.3:
        subcommand = rng.choice(sorted(REFUSED))
        words = [*subcommand.split(), *rng.choice(REFUSED[subcommand])]
        expected = (1, 2)
    else:
        subcommand = rng.choice(sorted(SUBCOMMANDS))
        words, expected = subcommand.split(), (0, 1, 2)
        for option in rng.sample(SUBCOMMANDS[subcommand], min(rng.choice((1, 2)), len(SUBCOMMANDS[subcommand]))):
            words += [option, rng.choice(WORDS)] if option else [rng.choice(WORDS)]

    def run() -> Any:
        result = CliRunner().invoke(cli.app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in expected, result.output
        return result.exit_code

    return run, f"mmdec {words}"[:300], True


def kind(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, (str, int, float, bytes, type(None))) else type(value).__name__


def answer(value: Any) -> Any:
    """Reduce a result to what two equal calls share: without seconds."""
    if isinstance(value, mmdec.Translation):
        return value.text, value.units, value.audio.tobytes()
    if isinstance(value, mmdec.Transcript):
        return value.text, value.tokens
    if isinstance(value, mmdec.Generation):
        return value.sequences.tolist()
    if isinstance(value, (list, tuple)):
        return [answer(item) for item in value]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if hasattr(value, "tokens") and hasattr(value, "rows"):  # a round
        return value.rows
    return value if isinstance(value, (str, int, float)) else type(value).__name__


@pytest.fixture
def elsewhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Goes into a new folder, in which the models, the recording and the corpus are found."""

    def enter(name: str) -> None:
        place = tmp_path / name / "deep"  # so that ".." is still the test's own
        place.mkdir(parents=True)
        for path in folder.iterdir():
            (place / path.name).symlink_to(path)
        monkeypatch.chdir(place)

    threads = torch.get_num_threads()
    yield enter
    torch.set_num_threads(threads)


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"a call of more than {SECONDS} seconds of the processor, or {HANGS} in all")

    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(HANGS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        torch.manual_seed(0)
        return "gave", call()
    except MmdecError as error:
        return type(error).__name__, str(error)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        return "TypeError", str(error)
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


@pytest.mark.parametrize("group", range(GROUPS))
def test_odd_arguments_are_taken_or_refused_clearly(
    group: int, entry_points: dict[str, Door], elsewhere: Callable[[str], None]
) -> None:
    faults, different = list[str](), list[str]()
    for number in range(group, CALLS, GROUPS):
        seed, result = f"arguments {number}", []
        for turn in range(2):
            elsewhere(f"{number}-{turn}")
            call, words, own = drawn_call(seed, entry_points)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # transformers warns of options that do nothing
                    how, value = outcome(call)
                result.append((how, answer(value) if own or how != "gave" else None))
            except Exception as error:
                faults.append(f"{number}: {words}: {type(error).__name__}: {error!s:.300}")
                break
        if len(result) == 2 and result[0] != result[1]:
            different.append(f"{number}: {words}: {result[0]!s:.300} and {result[1]!s:.300}")
    assert (faults, different) == ([], []), "\n".join([*faults, *different])
