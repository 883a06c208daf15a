"""Times rounds of a Whisper with random weights and Medusa heads, with the fast pass on and off.

On a GPU the fast pass replays CUDA graphs; on a CPU it only uses fixed shapes. A round is the drafter, the target's
pass and the core (all other time), as `decode/loop.py` measures them. The second part of this file checks that two
models with the same weights, but different implementations of a pass, give the same logits for drafts.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import AutoModelForSpeechSeq2Seq, PreTrainedModel, WhisperConfig
from transformers.modeling_outputs import BaseModelOutput

from mmdec.decode.loop import Round
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.tree import trees_from_lists
from mmdec.drafters.medusa import Medusa
from mmdec.evaluation.bench.pairing import Paired
from mmdec.evaluation.quality.harness import quiet
from mmdec.generation.speculation import speculate
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.targets.fast_pass import fast_pass
from mmdec.targets.registry import target_of
from mmdec.types import Draft, MmdecError, Needs, Verdict

SPEECHES: dict[str, dict[str, int]] = {  # sizes of Whisper models: channels, layers, attention heads
    "tiny": {"d_model": 384, "layers": 4, "heads": 6},
    "small": {"d_model": 768, "layers": 12, "heads": 12},
}
NODES, DEPTH = 16, 6  # nodes of a draft, root included, and its greatest depth
NEW_TOKENS = 96  # length of the text whose rounds are timed
HEADS = 10  # number of Medusa heads
GRAPHS, SHAPES = "CUDA graphs", "fixed shapes without graphs"  # what the fast pass uses on a GPU, and on a CPU
PARTS: dict[str, Callable[[Round], float]] = {
    "round": lambda round_: round_.target + round_.drafter + round_.core,
    "draft's pass": lambda round_: round_.target,
}
# Largest relative difference of two models' logits. In bfloat16, rounding in 28 layers gives up to 0.05. An error, such
# as one node with a wrong parent after a short prompt, gives 0.5 or more.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
# rounds whose logits are compared: the fast pass captures a graph in the third, and replays it in the fourth
ROUNDS = 4


def random_speech_model(size: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Create a Whisper with random weights on the device. size: a key of `SPEECHES`.

    The model never ends a text: the end token's row of the output matrix is 0, so its logit is 0, and another token's
    is higher.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SPEECHES[size])
    width, layers, heads = sizes.pop("d_model"), sizes.pop("layers"), sizes.pop("heads")
    config = WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        init_std=width**-0.5,  # with this deviation of the random weights, each layer keeps the scale of its input
        **sizes,
    )
    with torch.device(device):
        model: Any = AutoModelForSpeechSeq2Seq.from_config(config, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        model.get_input_embeddings().weight[config.eos_token_id] = 0
    return model.eval()


def speech_rounds(
    size: str, device: torch.device, dtype: torch.dtype, repeats: int, new_tokens: int = NEW_TOKENS
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Time a whole round, and its target pass alone, with the fast pass on and off.

    Logits are compared first; in float32 the texts must be equal, too. In bfloat16, rounding may change which of two
    tokens a random model chooses; the row's `equal_texts` then is False.

    size: a key of `SPEECHES`. repeats: timed pairs of calls.
    Returns: rows of the report as dicts, and what was not measured -> why.
    Raises: MmdecError if logits or float32 texts differ.
    """
    on = random_speech_model(size, device, dtype)
    off = twin(on)
    gpu = device.type == "cuda"
    fast_pass(on).enabled, fast_pass(off).enabled = None if gpu else True, False
    group = f"{size} speech model, {NODES} nodes, {str(dtype).removeprefix('torch.')}"
    kind = GRAPHS if gpu else SHAPES
    if reason := fast_pass(on).why_not():
        return [], {f"{group}, {kind}": reason}
    inputs, draft = prompt_of(on), binary_tree(NODES, on.config.vocab_size, device)
    found = compare(f"fast pass, {group}", Run(on, inputs), Run(off, inputs), draft)

    features = _features(on)
    runs = [_decoding(model, features, new_tokens) for model in (on, off)]
    (words, _), (plain, _) = (run() for run in runs)  # the first, untimed calls: their texts are compared
    equal = torch.equal(words, plain)
    if dtype == torch.float32 and not equal:
        raise MmdecError(
            f"fast pass, {group}: the texts of the two sides differ. No time was taken. Report this as a bug."
        )
    laps = [[run()[1] for run in runs] for _ in range(repeats)]
    fast = fast_pass(on)
    if gpu and not fast.captured:
        return [], {f"{group}, {kind}": fast.why_not() or "no graph was captured"}
    row = {
        "subject": f"fast pass, {kind}",
        "baseline": "pass by pass",
        "group": group,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": 1,
        "differences": found,
        "equal_texts": equal,
        "rounds": len(laps[0][0]),
        "graphs": fast.captured,
        "fast_pass_mib": fast.bytes / 2**20,
    }
    return [
        {**row, "timed": timed, "pair": Paired.of([(_median(a, part), _median(b, part)) for a, b in laps])}
        for timed, part in PARTS.items()
    ], {}


def _decoding(model: PreTrainedModel, features: Tensor, new_tokens: int) -> Callable[[], tuple[Tensor, list[Round]]]:
    """Make a function that calls `generate` with random Medusa heads. It returns the token ids, and the rounds after
    the prompt's pass. features: (1, mels, T) of a window."""
    network: Any = model  # typed as `Any`, because `PreTrainedModel` does not declare `generate`
    torch.manual_seed(1)
    heads = MedusaHeads(MedusaConfig(model.config.d_model, model.config.vocab_size, heads=HEADS))
    drafter = Medusa(heads.to(model.device, model.dtype), network.proj_out)
    rounds: list[Round] = []
    plug = speculate(
        drafter,
        num_speculative_tokens=(NODES - 1, DEPTH),
        on_round=rounds.append,
        statistics=DecodingStatistics(),
    )

    def run() -> tuple[Tensor, list[Round]]:
        rounds.clear()
        with quiet():
            ids = network.generate(
                input_features=features, max_new_tokens=new_tokens, do_sample=False, custom_generate=plug
            )
        return ids, rounds[1:]

    return run


def prompt_of(model: PreTrainedModel) -> dict[str, Any]:
    """Make a short prompt, with the encoder's states of random sound, as inputs of the target's `prefill`."""
    network: Any = model
    with torch.no_grad():
        states = network.get_encoder()(_features(model)).last_hidden_state
    ids = torch.tensor([[model.config.decoder_start_token_id, 3, 1, 4]], device=model.device)
    return {"input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}


def _features(model: PreTrainedModel) -> Tensor:
    """Draw random features (1, mels, T): T frames, a whole window."""
    shape = 1, model.config.num_mel_bins, 2 * model.config.max_source_positions
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(model.device, model.dtype)


def _median(rounds: list[Round], part: Callable[[Round], float]) -> float:
    return statistics.median(part(round_) for round_ in rounds)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that shares the weights of `model`, but has its own configuration and its own switch of the fast
    pass."""
    network = cast(nn.Module, model)
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return copy.deepcopy(model, cast(Any, shared))


def binary_tree(nodes: int, vocab_size: int, device: torch.device) -> Draft:
    """Make a draft (1, nodes) of random tokens as a binary tree: node n is a child of node (n - 1) // 2."""
    drawn = torch.randint(vocab_size, (nodes,), generator=torch.Generator().manual_seed(0))
    # Index of the parent of each node from node 1 on. Node 0 is the root.
    parents = [node // 2 for node in range(nodes - 1)]
    return trees_from_lists(drawn[:1].to(device), [(drawn[1:].tolist(), parents)])


@final
class Run:
    """A model and its cache after a prompt. Each call scores a draft and accepts only its root."""

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
        """inputs: arguments of the target's `prefill`, for a batch of one."""
        self.target = target_of(model)
        self.session: Any = self.target.prefill(inputs, Needs())[0]

    @torch.inference_mode()
    def __call__(self, draft: Draft) -> Tensor:
        """Score a draft and commit its root. Returns logits (1, N, V) of N nodes over V tokens."""
        scores = self.target.score(self.session, draft)
        root, following = torch.zeros_like(draft.tokens[:, :1]), draft.tokens[:, 0]
        verdict = Verdict(
            root, following, torch.zeros_like(following, dtype=torch.bool), root, torch.ones_like(following)
        )
        self.target.commit(self.session, verdict)
        return scores.logits


def compare(what: str, a: Run, b: Run, draft: Draft) -> float:
    """Return the largest relative difference of two models' logits over `ROUNDS` rounds with the same draft.

    what: name of the comparison, for the error.
    Raises: MmdecError if the difference is over `LIMITS`.
    """
    worst = 0.0
    for _ in range(ROUNDS):
        result = a(draft)
        found, limit = difference(result, b(draft)), LIMITS[result.dtype]
        if not found <= limit:  # not `found > limit`, which would be false for NaN
            raise MmdecError(
                f"{what}: logits of the two sides must differ by at most {limit:g} of their size, but differ by "
                f"{found:.3g}. No time was taken. Report this as a bug."
            )
        worst = max(worst, found)
    return worst


def difference(result: Tensor, reference: Tensor) -> float:
    """Divide the norm of the logits' difference by the norm of the reference at each node, and return the largest
    ratio.

    result, reference: logits (1, N, V) of N nodes.
    """
    apart = (result.float() - reference.float()).norm(dim=-1)
    return float((apart / reference.float().norm(dim=-1)).max())
