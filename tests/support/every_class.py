"""Tests whether drafting is exact for every causal class of transformers, on small models with sliding windows.

`python -m tests.support.every_class OUTPUT.jsonl [NAME ...]` tests each class in a separate process, which is ended
after `SECONDS`, and appends one line of JSON for it. Classes that are in OUTPUT already are skipped, so that the same
call continues. `python -m tests.support.every_class OUTPUT.jsonl --table` prints the table of
docs/reference/classes.md.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import mmdec
from mmdec.errors import InputError
from mmdec.targets.probe import PROBE_VOCABULARY, PROBE_WINDOW, WEIGHT_DEVIATION, tiny_model
from mmdec.targets.registry import make_target
from tests.support.families import OWN
from tests.support.random_drafter import RandomDrafter
from tests.support.recurrent import OWN as RECURRENT
from tests.support.recurrent import recurrent_config

SECONDS = 300  # time limit of a class
LONGEST = 240  # the most characters of a reason
NEW = 24  # tokens of each text
LENGTHS = (21, 15, 9, 4)  # tokens of a batch's rows: from half a window to two and a half
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "classes.md"
CLASSES = sorted(
    {
        name
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ((names,) if isinstance(names, str) else names)
    }
)


GEMMA: dict[str, Any] = {
    "vocab_size": PROBE_VOCABULARY,
    "vocab_size_per_layer_input": PROBE_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 128,
    "sliding_window": PROBE_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "pad_token_id": 0,
}
PLAIN: dict[str, Any] = {
    "vocab_size": PROBE_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
# families of encoder-decoders, whose decoders alone are causal models
SEQUENCES = "Bart BigBirdPegasus Blenderbot BlenderbotSmall MBart Marian Mvp PLBart Pegasus ProphetNet Whisper"
# settings of classes that `tiny_model` cannot make small, or whose default configuration does not work
SMALL: dict[str, dict[str, Any]] = {
    "Gemma3nForCausalLM": GEMMA,
    "Gemma4ForCausalLM": {**GEMMA, "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}}},
    "Gemma4UnifiedForCausalLM": {
        **GEMMA,
        "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
        "use_bidirectional_attention": None,
    },
    "CohereCompassForCausalLM": {
        **PLAIN,
        "sliding_window": PROBE_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "DbrxForCausalLM": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "vocab_size": PROBE_VOCABULARY,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "RoCBertForCausalLM": {
        **PLAIN,
        "is_decoder": True,
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": PROBE_VOCABULARY,
        "shape_embed_dim": 8,
        "shape_vocab_size": PROBE_VOCABULARY,
    },
    "XmodForCausalLM": {**PLAIN, "is_decoder": True, "default_language": "en_XX"},
    "HrmTextForCausalLM": {**PLAIN, "num_layers_per_stack": 2, "num_hidden_layers": 16},
    **{
        f"{name}ForCausalLM": {
            "vocab_size": PROBE_VOCABULARY,
            "d_model": 32,
            "hidden_size": 32,
            "decoder_layers": 2,
            "num_decoder_layers": 2,
            "encoder_layers": 2,
            "num_encoder_layers": 2,
            "decoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_attention_heads": 4,
            "num_encoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "encoder_ffn_dim": 48,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
        }
        for name in SEQUENCES.split()
    },
    "XLNetLMHeadModel": {
        "vocab_size": PROBE_VOCABULARY,
        "d_model": 32,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 48,
        "d_head": 8,
    },
    "RwkvForCausalLM": {**PLAIN, "attention_hidden_size": 32},
}


@dataclass(frozen=True)
class Outcome:
    """The result of testing one class.

    outcome: "exact", "wrong" (a text differs), "undrafted" (no draft was accepted), "refused" by mmdec, "excluded" (no
        small model of the class can generate) or "error" (the test failed).
    """

    name: str
    outcome: str
    reason: str = ""
    windows: bool = False  # whether a layer of the model has a sliding window
    calls: int = 0  # number of compared texts
    drafted: int = 0  # number of drafted tokens
    accepted: int = 0  # number of accepted ones
    seconds: float = 0.0


def windowed_config(name: str) -> PreTrainedConfig:
    """Make a class's default configuration, with sliding windows in some layers if the class has such a setting."""
    short = name.removesuffix("ForCausalLM")
    if short in RECURRENT:
        return recurrent_config(short)
    kind: Any = getattr(transformers, name).config_class
    known = {key: value for key, value in kind().to_dict().items() if key not in ("model_type", "transformers_version")}
    on: dict[str, Any] = {}
    if "is_decoder" in known:
        on["is_decoder"] = True
    if "sliding_window" in known:
        on["sliding_window"] = PROBE_WINDOW
        if "use_sliding_window" in known:
            on["use_sliding_window"] = True
        types: list[str] = known.get("layer_types") or []
        if types and set(types) == {"full_attention"}:
            on["layer_types"] = ["sliding_attention", *types[1:]]
    return kind(**{**known, **OWN.get(name, {}), **on})


def make_network(name: str) -> Any:
    """Build a small random model of a class."""
    kind: Any = getattr(transformers, name)
    attention = "sdpa" if kind._supports_sdpa else "eager"
    if name not in SMALL:
        return tiny_model(kind, windowed_config(name), attention)
    known = kind.config_class().to_dict()
    shape = kind.config_class(**{key: value for key, value in SMALL[name].items() if key in known})
    shape._attn_implementation, shape._experts_implementation = attention, "eager"
    torch.manual_seed(0)
    model = kind(shape)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, WEIGHT_DEVIATION)
    return model.eval()


def short_reason(error: BaseException) -> str:
    """Write an error as one short line."""
    text = str(error).split(" These families work:")[0].split(" Of models that do,")[0]
    text = re.sub("must be a Whisper or a decoder-only language", "must be a decoder-only language", text)
    if not isinstance(error, InputError):
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.split())[:LONGEST].replace("|", "/")


def prompts(name: str, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Make repetitive prompts of these lengths, padded on the left."""
    rng, width = random.Random(name), max(lengths)
    rows = [([rng.randrange(3, PROBE_VOCABULARY) for _ in range(5)] * width)[:length] for length in lengths]
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def tried(name: str) -> Outcome:
    """Decode with a class in several ways, and compare with transformers' `generate`."""
    started = time.perf_counter()
    try:
        model = make_network(name)
    except Exception as error:
        return _without_weights(name, f"no small model can be made: {short_reason(error)}")
    greedy: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    sampled = {**greedy, "do_sample": True, "temperature": 0.8}
    batches = [prompts(name, (LENGTHS[0],)), prompts(name, (4,)), prompts(name, LENGTHS)]
    try:
        expected = [model.generate(**inputs, **greedy) for inputs in batches]
    except Exception as error:
        return _without_weights(name, f"stock `generate` fails: {short_reason(error)}")
    try:
        make_target(model)
    except InputError as error:
        return Outcome(name, "refused", short_reason(error), _has_windows(model))
    calls, drafted, accepted, wrong = 0, 0, 0, list[str]()
    for number, (inputs, text) in enumerate(zip(batches, expected, strict=True)):
        rows = len(text)
        for drafter in ("lookup", "recycling", "wild"):
            given: Any = RandomDrafter(0.5, text.tolist(), 0.8) if drafter == "wild" else drafter
            result = mmdec.generate(model, inputs, given, num_speculative_tokens=(9, 5), **greedy)
            pairs = [(result, text)]
            if drafter != "wild" and number != 1:
                seed = None if rows == 1 else 7
                torch.manual_seed(3)
                if rows == 1:
                    plain = model.generate(**inputs, **sampled)
                else:
                    plain = mmdec.generate(model, inputs, None, seed=seed, **sampled).sequences
                torch.manual_seed(3)
                result = mmdec.generate(model, inputs, given, num_speculative_tokens=(9, 5), seed=seed, **sampled)
                pairs.append((result, plain))
            for way, (one, right) in enumerate(pairs):
                calls += 1
                drafted += sum(sum(round_.drafted) for round_ in one.rounds)
                accepted += sum(sum(round_.accepted) for round_ in one.rounds)
                if not torch.equal(one.sequences, right):
                    wrong.append(f"{drafter}, batch {rows}, {('greedy', 'sampled')[way]}, prompt {number}")
    outcome = "wrong" if wrong else "exact" if accepted else "undrafted"
    seconds = round(time.perf_counter() - started, 1)
    return Outcome(name, outcome, "; ".join(wrong), _has_windows(model), calls, drafted, accepted, seconds)


def _without_weights(name: str, why: str) -> Outcome:
    """Judge a class whose small model cannot generate: "refused" if mmdec refuses its default model, else
    "excluded"."""
    kind: Any = getattr(transformers, name)
    try:
        with torch.device("meta"):
            model = kind(kind.config_class())
    except Exception:
        return Outcome(name, "excluded", why)
    try:
        make_target(model)
    except InputError as error:
        return Outcome(name, "refused", short_reason(error))
    except Exception:
        pass
    return Outcome(name, "excluded", why)


def _has_windows(model: Any) -> bool:
    from transformers import DynamicCache

    config = model.config.get_text_config(decoder=True)
    return any(getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers)


def _child(name: str, pipe: Any) -> None:
    signal.alarm(SECONDS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        outcome = tried(name)
    except BaseException as error:
        outcome = Outcome(name, "error", short_reason(error))
    pipe.send(outcome)
    pipe.close()


def outcome_of(name: str) -> Outcome:
    """Test a class in a separate process, so that a hang or a crash ends only that process."""
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, there))
    child.start()
    there.close()
    try:
        outcome = here.recv()
    except EOFError:
        outcome = None
    child.join()
    if outcome is None:
        return Outcome(name, "error", f"its process ended with {child.exitcode} (after {SECONDS} s: {-signal.SIGALRM})")
    return outcome


def table(rows: list[dict[str, Any]]) -> str:
    """Write the outcomes as a Markdown table."""
    lines = ["| class | outcome | window | reason |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row["name"].lower()):
        lines.append(f"| {row['name']} | {row['outcome']} | {'yes' if row['windows'] else ''} | {row['reason']} |")
    return "\n".join(lines)


def windowed() -> list[str]:
    """List the exact classes with windows in docs/reference/classes.md that the installed transformers has."""
    named = re.findall(r"^\| (\w+) \| exact \| yes \|", PAGE.read_text("utf-8"), re.MULTILINE)
    return [name for name in named if name in CLASSES]


def recorded() -> dict[str, str]:
    """Read each class's outcome from docs/reference/classes.md."""
    return dict(re.findall(r"^\| (\w+) \| (exact|refused|excluded) \|", PAGE.read_text("utf-8"), re.MULTILINE))


def main() -> None:
    """Run the command line."""
    output, *names = sys.argv[1:]
    path = Path(output)
    done = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    if names == ["--table"]:
        print(table(done))
        return
    known = {row["name"] for row in done}
    for name in names or CLASSES:
        if name not in known:
            outcome = outcome_of(name)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(f"{outcome.name}: {outcome.outcome} {outcome.reason[:160]}", flush=True)


if __name__ == "__main__":
    main()
