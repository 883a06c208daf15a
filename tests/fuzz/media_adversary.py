"""Random tests of models with images or sound and of encoder-decoders: random inputs, options, drafters, budgets and
calls.

Texts must equal those without drafts. A malformed input must end in an InputError, or in the text of transformers'
`generate`. A long run, `python -m tests.fuzz.media_adversary FIRST END FILE`, appends the results of each hundred
cases that are not in FILE yet.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT, transformers_release
from mmdec.errors import InputError
from mmdec.io.images import to_pil
from mmdec.pretrained.audio_lm import load_audio_lm
from mmdec.pretrained.vlm import load_vlm
from mmdec.targets.families import AUDIO_FAMILIES, VISION_FAMILIES
from tests.fuzz.adversary import options_of
from tests.support import audio_lm_folders as hearing_folders
from tests.support import vlm_folders as seeing_folders
from tests.support.encoder_decoders import CLASSES, VOCABULARY, attentions, encoder_decoder, sources
from tests.support.media_models import FOR, media_inputs, media_model
from tests.support.random_drafter import RandomDrafter
from tests.support.tiny_vlm import KINDS, batch_of, row_of, vision_model
from tests.support.vision_drafters import DRAFTERS

CHUNK = 100
AXES = ("Qwen2_5OmniThinker", "Qwen3VLMoe", "Glm4v", "Glm4vMoe", "GlmOcr")  # their positions have three axes
OTHERS = ("Llava", "LlavaNext", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")  # families that `tiny_vlm` builds
BROKEN = ("Llama4",) if transformers_release() == (5, 24) else ()  # transformers' own `generate` fails
MEDIA = [name for name in f"{VISION_FAMILIES} {AUDIO_FAMILIES}".split() if name not in (*OTHERS, *BROKEN)]
HELD = [0, *range(56, 64)]  # tokens that answers must not have: padding, placeholders and their marks
NETWORKS = ("eagle", "eagle3", "msd", "heads", "small")
ENTRY_POINTS = ("generate", "stream", "custom")


@dataclass
class Report:
    """The results of several cases."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # a line for each text that differs
    foreign: list[str] = field(default_factory=list)  # a line for each error that is not an mmdec error
    refused: list[str] = field(default_factory=list)  # a line for each valid call that was refused


def attack(seed: int, report: Report) -> None:
    """Test one random case."""
    rng = random.Random(seed)
    kind = rng.choices((sees, translates, asks, hears), (10, 5, 2, 2))[0]
    report.counts["cases"] += 1
    report.counts[kind.__name__] += 1
    try:
        kind(rng, report, f"{seed}:")
    except InputError as error:
        report.refused.append(f"{seed}: {error}")
    except Exception as error:
        if "probability tensor" in str(error):  # random weights may overflow, and no loop can sample then
            report.counts["stock fails"] += 1
        else:
            frames = [
                f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
            ]
            report.foreign.append(f"{seed}: {type(error).__name__}: {str(error)[:300]} {frames}")


def sees(rng: random.Random, report: Report, case: str) -> None:
    """Test a model with 0 to 3 images or sounds in each row, sometimes with a second turn."""
    family, seed, batch = rng.choice([*MEDIA, *KINDS]), rng.randrange(2**31), rng.choice((1, 1, 2, 3, 4))
    if family in KINDS:
        model: Any = vision_model(family)
        inputs = batch_of(family, [row_of(rng, rng.choice(("none", "one", "three", "video"))) for _ in range(batch)])
    else:
        model = media_model(family + FOR, rng.choice((None, None, "eager", "mmdec_tree")))
        inputs = media_inputs(model, [rng.randrange(4) for _ in range(batch)], seed)
    options = {**options_of(rng), "suppress_tokens": HELD}
    case += f" {family} {batch=} {options}"
    if rng.random() < 0.2:
        _malformed(rng, model, inputs, report, case)
        return
    name = rng.choice(("lookup", "recycling", "wild", "wild", *NETWORKS))
    turns = batch == 1 and family in MEDIA and family not in AXES and not options["do_sample"] and rng.random() < 0.5
    caches = [DynamicCache(config=model.config) for _ in range(2)] if turns else [None, None]
    for turn in range(1 + turns):
        given = [{**inputs, **({CACHE_ARGUMENT: cache} if turns else {})} for cache in caches]
        expected = _stock(model, given[0], options)
        if name == "wild":
            drafter = RandomDrafter(rng.random(), expected.tolist(), rng.choice((0.0, 0.5, 0.9, 1.0)))
        else:
            drafter = DRAFTERS[name](model, expected.tolist())
        entry_point = "generate" if turns else None  # a cache is continued by one call alone
        _compare(rng, model, given[1], options, drafter, expected, report, f"{case} {name} {turn=}", entry_point)
        report.counts["second turns"] += turn
        ids = torch.cat([expected, torch.tensor([[7, 9, 8, 7, 9][: rng.randint(1, 5)]] * batch)], 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if family in ("Gemma3", "PaliGemma"):
            inputs["token_type_ids"] = torch.zeros_like(ids)


def translates(rng: random.Random, report: Report, case: str) -> None:
    """Test an encoder-decoder, with sources of several lengths."""
    family, batch = rng.choice([*CLASSES]), rng.choice((1, 1, 2, 3, 4))
    model = encoder_decoder(family, rng.choice(attentions(family)))
    inputs, options = sources(model, batch, rng.randrange(2**31)), options_of(rng, VOCABULARY - 1)
    del options["pad_token_id"], options["suppress_tokens"]
    case += f" {family} {batch=} {options}"
    if rng.random() < 0.2:
        _malformed(rng, model, inputs, report, case)
        return
    expected, name = _stock(model, inputs, options), rng.choice(("lookup", "recycling", "wild"))
    drafter: Any = RandomDrafter(rng.random(), expected.tolist(), 0.8) if name == "wild" else name
    _compare(rng, model, inputs, options, drafter, expected, report, f"{case} {name}", None)


def _stock(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Return the text of transformers' `generate`. For sampled batches, whose random draws differ from mmdec's, return
    that of mmdec without drafts."""
    given = dict(options)
    seed = given.pop("seed", None)
    if seed is not None and len(next(iter(inputs.values()))) > 1:
        return mmdec.generate(model, inputs, None, seed=seed, **given).sequences
    torch.manual_seed(seed or 0)
    return model.generate(**inputs, **given)


def _compare(
    rng: random.Random,
    model: Any,
    inputs: dict[str, Any],
    options: dict[str, Any],
    drafter: Any,
    expected: Tensor,
    report: Report,
    case: str,
    entry_point: str | None,
) -> None:
    """Decode with drafts, by one of the calls in `ENTRY_POINTS`, and compare with `expected`. case: describes the
    case."""
    given, entry_point = dict(options), entry_point or rng.choice(ENTRY_POINTS)
    seed = given.pop("seed", None)
    nodes: Any = rng.choice((None, 0, 1, rng.randint(2, 24), (rng.randint(2, 24), rng.randint(1, 6))))
    speculation: dict[str, Any] = {"num_speculative_tokens": nodes}
    if seed is not None and len(expected) > 1:
        speculation["seed"] = seed
    torch.manual_seed(seed or 0)
    if entry_point == "custom":
        result = model.generate(**inputs, **given, custom_generate=mmdec.speculate(drafter, **speculation))
    elif entry_point == "generate":
        result = mmdec.generate(model, inputs, drafter, **speculation, **given).sequences
    else:
        rows: list[list[int]] = [[] for _ in expected]
        for round_ in mmdec.stream(model, inputs, drafter, **speculation, **given):
            for row, tokens in zip(round_.rows, round_.tokens, strict=True):
                rows[row] += tokens
        longest, result = max(map(len, rows)), expected.clone()
        for row, tokens in enumerate(rows):
            start = expected.shape[1] - longest
            result[row, start : start + len(tokens)] = torch.tensor(tokens)
    report.counts["tokens"] += expected.numel()
    if not torch.equal(result, expected):
        report.wrong.append(f"{case} {nodes} {entry_point}")


BREAKS: tuple[Callable[[random.Random, Any], Any], ...] = (
    lambda rng, value: None,
    lambda rng, value: value[:1].repeat(5, *[1] * (value.ndim - 1)),
    lambda rng, value: value[..., : max(value.shape[-1] // 2, 1)],
    lambda rng, value: value.unsqueeze(0),
    lambda rng, value: value.flatten(),
    lambda rng, value: value[:0],
    lambda rng, value: value.tolist(),
    lambda rng, value: value.float() * float("nan"),
    lambda rng, value: value.long() + rng.choice((-3, 70, 10**6)),
    lambda rng, value: rng.choice(("text", 3, object())),
)


def _malformed(rng: random.Random, model: Any, inputs: dict[str, Any], report: Report, case: str) -> None:
    """Break one input. Decoding must end in an InputError, or in the text that `generate` returns."""
    name, how = rng.choice([*inputs]), rng.randrange(len(BREAKS))
    broken = {**inputs, name: BREAKS[how](rng, inputs[name])}
    report.counts["malformed"] += 1
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    try:
        result = mmdec.generate(model, broken, "lookup", num_speculative_tokens=3, **options).sequences
    except InputError:
        report.counts["malformed, refused"] += 1
        return
    except Exception as error:
        report.foreign.append(f"{case} {name} broken by {how}: {type(error).__name__}: {str(error)[:300]}")
        return
    try:
        expected = model.generate(**broken, **options)
    except Exception:
        report.counts["malformed, answered where stock fails"] += 1
        return
    if not torch.equal(result, expected):
        report.wrong.append(f"{case} {name} broken by {how}")


@lru_cache
def folder_of(family: str) -> Any:
    """Load a family's model and processor from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        if family in hearing_folders.FAMILIES:
            return load_audio_lm(hearing_folders.write(family, Path(folder) / family))
        return load_vlm(seeing_folders.write(family, Path(folder) / family))


def asks(rng: random.Random, report: Report, case: str) -> None:
    """Test `mmdec.describe` with pictures of odd sizes against `generate` on the family's processor's output."""
    needs = seeing_folders.NEEDS
    here = [name for name in seeing_folders.FAMILIES if name not in BROKEN and all(map(find_spec, needs.get(name, ())))]
    vlm = folder_of(rng.choice(here))
    sides = lambda: rng.choice((1, 2, rng.randint(1, 40), rng.randint(20, 90), rng.choice((3, 300))))  # noqa: E731
    pixels = np.random.default_rng(rng.getrandbits(32))
    shown = [pixels.integers(0, 255, (sides(), sides(), 3), dtype=np.uint8) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    prompt = rng.choice(("What is this?", "?", "a" * rng.randint(1, 60), "Où est l’étoile \U0001f31f?\n\n"))
    content = [*[{"type": "image"}] * len(shown), {"type": "text", "text": prompt}]
    options = _spoken_options(rng)
    case += f" {type(vlm.model).__name__} {[picture.shape for picture in shown]} {prompt!r} {options}"

    def stock() -> list[int]:
        text = vlm.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        given = {"text": [text], "return_tensors": "pt", "add_special_tokens": False}
        inputs = vlm.processor(images=[[*map(to_pil, shown)]] if shown else None, **given)
        inputs.pop("labels", None)
        return vlm.model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()

    _spoken(
        rng,
        stock,
        lambda **given: mmdec.describe(tuple(shown), prompt, model=vlm, **given),
        vlm,
        options,
        report,
        case,
    )


def hears(rng: random.Random, report: Report, case: str) -> None:
    """Test `mmdec.transcribe` with sound of odd lengths against `generate` on the family's processor's output."""
    heard = folder_of(rng.choice(hearing_folders.FAMILIES))
    length = rng.choice((1, 2, rng.randint(3, 400), rng.randint(400, 32000), 32000, 32001))
    sound = (0.15 * np.random.default_rng(rng.getrandbits(32)).standard_normal(length)).astype(np.float32)
    options, processor = _spoken_options(rng), heard.processor
    case += f" {type(heard.model).__name__} {length} samples {options}"

    def stock() -> list[int]:
        asked = "Transcribe the speech."
        if hasattr(processor, "apply_transcription_request"):
            inputs = processor.apply_transcription_request([sound])
        else:
            simple = type(processor).__name__.startswith("Granite")
            content: Any = [{"type": "audio"}, {"type": "text", "text": asked}]
            text = processor.apply_chat_template(
                [{"role": "user", "content": processor.audio_token + asked if simple else content}],
                add_generation_prompt=True,
                tokenize=False,
            )
            kinds = {"text_kwargs": {"add_special_tokens": False}, "audio_kwargs": {"sampling_rate": 16000}}
            inputs = processor(text=[text], audio=[sound], return_tensors="pt", **kinds)
        return heard.model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()

    _spoken(
        rng,
        stock,
        lambda **given: mmdec.transcribe(sound, model=heard, sample_rate=16000, **given),
        heard,
        options,
        report,
        case,
    )


def _spoken_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 20), "do_sample": rng.random() < 0.3}
    return options | rng.choice(({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 1}))


def _spoken(
    rng: random.Random,
    stock: Callable[[], list[int]],
    call: Callable[..., Any],
    loaded: Any,
    options: dict[str, Any],
    report: Report,
    case: str,
) -> None:
    """Compare a call's tokens with those of `stock`. If `stock` fails, the call may answer or raise an mmdec error."""
    torch.manual_seed(5)
    try:
        expected: list[int] | None = stock()
    except Exception:
        expected = None
        report.counts["stock fails"] += 1
    name, nodes = rng.choice(("lookup", "recycling", *NETWORKS)), rng.choice((None, 1, 4, (12, 4)))
    drafter: Any = DRAFTERS[name](loaded.model, [expected or [0]])
    torch.manual_seed(5)
    try:
        result = call(drafter=drafter, num_speculative_tokens=nodes, **options)
    except (InputError, mmdec.BatchError) as error:
        report.counts["refused"] += 1
        if expected is not None and " must last at " not in str(error):  # sounds have a least and a most length
            report.refused.append(f"{case} {name}: {error}")
        return
    note = getattr(result, "note", "")
    if expected is not None and result.tokens != expected and "silent" not in (note or ""):
        report.wrong.append(f"{case} {name} {nodes}: {expected} {result.tokens}")


def main(first: int, end: int, file: Path) -> None:
    """Run the chunks first ... end - 1 that are not in the file yet, and append their results."""
    done = {json.loads(line)["chunk"] for line in file.read_text().splitlines()} if file.is_file() else set()
    for chunk in sorted({*range(first, end)} - cast(set[int], done)):
        report = Report()
        for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
            attack(seed, report)
        line = {"chunk": chunk, **report.counts, **{name: getattr(report, name) for name in NAMES}}
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")


NAMES = ("wrong", "foreign", "refused")
if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
