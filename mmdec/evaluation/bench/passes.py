"""Times whole passes of models with random weights: the end-to-end gain of tree attention and of CUDA graphs.

Two things are timed. The first is a language model's pass over a draft tree after a long prefix, with our tree
attention or with SDPA and a dense mask. The second is a round of a speech model with the fast pass on or off: on a GPU,
the fast pass replays captured CUDA graphs (`passes_transcription.py`). Random weights cost the same time as trained
ones. The logits of both variants are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mmdec.checks.arguments import check_choice
from mmdec.evaluation.bench.pairing import paired, prepared
from mmdec.evaluation.bench.passes_transcription import GRAPHS, SPEECHES, Run, binary_tree, compare, speech_rounds, twin
from mmdec.evaluation.bench.report import BenchReport, Exactness
from mmdec.evaluation.quality.harness import Log, no_log
from mmdec.hub.provenance import hardware
from mmdec.ops.kernels import why_not
from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.fast_pass import fast_pass

TEXTS: dict[str, dict[str, int]] = {  # sizes of language models: about 30 million parameters, and Qwen2.5-VL-7B's
    "30M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 2},
    "7B": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4},
}  # fmt: skip
SHORT = 16  # prefix tokens when logits are compared: so few that a wrong tree mask changes them clearly
DENSE = "SDPA, dense mask"
# type of the timing functions: they return rows of the report, and name of what was not measured -> the reason
Part = Callable[[], tuple[list[dict[str, Any]], dict[str, str]]]
SPEECH_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class PassSizes:
    """The sizes to measure."""

    text: str  # a key of `TEXTS`
    prefix: int  # tokens before the draft
    nodes: int  # size of the draft, root included
    speech: str  # a key of `passes_transcription.SPEECHES`


SIZES = {"cpu": PassSizes("30M", 1024, 16, "tiny"), "cuda": PassSizes("7B", 8192, 64, "small")}


def bench_passes(
    text: str | None = None,
    prefix: int | None = None,
    speech: str | None = None,
    *,
    repeats: int = 15,
    device: str | None = "cpu",
    threads: int = 1,
    log: Log = no_log,
) -> BenchReport:
    """Time a language model's pass and a speech model's round. A model that does not fit into the GPU's memory is only
    listed as not measured.

    text: the language model, a key of `TEXTS`. prefix: number of tokens before the draft. speech: the speech model, a
        key of `SPEECHES`. None for any of them: its value in `SIZES` for the device.
    Raises InputError for an unknown size, and MmdecError if two results differ.
    """
    for what, name, known in (("text", text, TEXTS), ("speech", speech, SPEECHES)):
        if name is not None:
            check_choice(what, name, [*known], "Choose one.")
    torch_device = prepared(device, threads)
    given = {"text": text, "prefix": prefix, "speech": speech}
    chosen = replace(SIZES[torch_device.type], **{name: size for name, size in given.items() if size is not None})
    text_dtype = torch.bfloat16 if torch_device.type == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    not_measured = _wanted_a_gpu() if torch_device.type == "cpu" else {}
    parts: dict[str, Part] = {
        f"pass of the {chosen.text} language model": partial(text_pass, chosen, torch_device, text_dtype, repeats)
    }
    for dtype in SPEECH_DTYPES[torch_device.type]:
        name = f"round of the {chosen.speech} speech model, {_short(dtype)}"
        parts[name] = partial(speech_rounds, chosen.speech, torch_device, dtype, repeats)
    for name, measure in parts.items():
        log(name)
        try:
            measured, missing = measure()
        except torch.OutOfMemoryError as error:
            measured, missing = [], {name: f"not enough GPU memory: {str(error).partition(chr(10))[0]}"[:300]}
        rows += measured
        not_measured |= missing
    return BenchReport(
        bench="passes",
        title="Whole passes and rounds, random weights",
        # In the report, "dtype" is the dtype of the language model.
        hardware=hardware(device=torch_device, dtype=text_dtype, batch=1, threads=threads),
        exactness=(Exactness("rows whose two sides agree", len(rows), len(rows)),),
        comparisons=tuple(
            row["pair"].row(row["subject"], row["baseline"], row["group"], "shape", row["timed"]) for row in rows
        ),
        not_measured=not_measured,
        details={"sizes": asdict(chosen), "rows": rows},
    )


def random_text_model(size: str, positions: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Create a Llama with random weights and tree attention on the device. size: a key of `TEXTS`. positions: maximum
    length."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {**TEXTS[size], "max_position_embeddings": positions}
    # With this standard deviation each layer keeps its input's scale, so attention affects the logits at every width.
    config = LlamaConfig(**shape, initializer_range=shape["hidden_size"] ** -0.5, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=TREE_ATTENTION)
    return model.eval()


def text_pass(
    sizes: PassSizes, device: torch.device, dtype: torch.dtype, repeats: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Time the language model's pass over a draft, and the acceptance of its root, with tree attention and with SDPA.

    With the fast pass (CUDA graphs), the cache has up to a quarter more places than tokens. SDPA reads the free places,
    tree attention skips them. So where the fast pass is used, SDPA is also timed with the fast pass off.

    Returns: rows of the report as dicts, and what was not measured -> why.
    """
    tree = random_text_model(sizes.text, 2 * sizes.prefix, device, dtype)
    dense: Any = twin(tree)
    dense.set_attn_implementation("sdpa")
    baselines = {DENSE: dense}
    if fast_pass(dense).why_not() is None:
        baselines[f"{DENSE}, fast pass off"] = twin(dense)
        fast_pass(baselines[f"{DENSE}, fast pass off"]).enabled = False
    vocabulary = tree.config.vocab_size
    draft = binary_tree(sizes.nodes, vocabulary, device)
    short, whole = ({"input_ids": _tokens(prefix, vocabulary).to(device)} for prefix in (SHORT, sizes.prefix))
    rows = []
    for baseline, model in baselines.items():
        near = compare(f"a pass behind {SHORT} tokens, {baseline}", Run(tree, short), Run(model, short), draft)
        a, b = Run(tree, whole), Run(model, whole)
        far = compare(f"a pass behind {sizes.prefix} tokens, {baseline}", a, b, draft)
        row = {
            "subject": "tree attention",
            "baseline": baseline,
            "group": f"{sizes.text} language model, {sizes.nodes} nodes, {sizes.prefix} before",
            "timed": "draft's pass",
            "pair": paired(partial(a, draft), partial(b, draft), repeats, device),
            "dtype": _short(dtype),
            "batch": 1,
            # relative differences of the logits, after the short prefix and after the whole one
            "differences": [near, far],
            "graphs": [fast_pass(side).captured for side in (tree, model)],
        }
        rows.append(row)
    reason = why_not(device.index) if device.type == "cuda" else None
    return rows, {} if reason is None else {"tree attention's kernel": reason}


def _tokens(count: int, vocabulary: int) -> Tensor:
    """Draw random token ids (1, count) below `vocabulary`."""
    return torch.randint(1, vocabulary, (1, count), generator=torch.Generator().manual_seed(1))


def _wanted_a_gpu() -> dict[str, str]:
    """Return the rows that need a GPU -> the reason why they are not measured here."""
    gpu = SIZES["cuda"]
    reason = "the CPU was asked for" if torch.cuda.is_available() else "no GPU"
    return {
        f"{gpu.text} language model, {gpu.nodes} nodes, {gpu.prefix} before": reason,
        f"{gpu.speech} speech model, {GRAPHS}": reason,
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
