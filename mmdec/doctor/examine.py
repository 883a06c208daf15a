"""The drafter doctor: tests whether a drafter is run as in its training, and measures how many tokens are accepted.

A checkpoint folder may not state some settings (here called conventions), such as which layers of the target a draft
network reads. If one differs from training, drafts are worse, but the text is the same. `examine` measures which share
of first drafted tokens is accepted on the target's greedy text, as the folder says and with each setting changed. A
change that clearly raises the share is a finding. It is kept in the search for the next one.

A gain is the mean difference over the positions of the texts. Its interval is that of a ratio of sums over texts (over
blocks of `POSITIONS_PER_BLOCK` positions if there are few texts), with Student's t. A finding gains at least
`MIN_GAIN`, and its interval lies above zero: at 95 % for all variants of one search together (Bonferroni), at 99 % for
the chat template and the LM head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.checks.sampling import evenly_spaced
from mmdec.doctor import searches
from mmdec.doctor.answers import (
    DoctorPrompt,
    ExaminedModel,
    NetworkRun,
    TargetAnswer,
    answer_prompt,
    chain_rounds,
    decoding_rounds,
    has_template,
    make_inputs,
    right_tokens,
)
from mmdec.doctor.conventions import CheckpointFolder, Remedy, Variant, variants
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.errors import InputError
from mmdec.hub.find import drafter_by_name
from mmdec.hub.provenance import measurement_conditions
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.targets.decoder import DecoderTarget
from mmdec.targets.registry import make_target
from mmdec.types import Drafter, Needs

MAX_ANSWER_TOKENS = 128  # the most tokens of an answer
CHAIN_LENGTHS = range(1, 8)  # lengths of the chains to measure
TREE_SIZES = ((8, 4), (16, 5), (32, 6), (60, 7))  # (nodes below the root, depth); the last is EAGLE-2's
MIN_GAIN = 0.01  # minimum rise of the share of accepted tokens of a reported change
MAX_CHANGES = 4  # maximum number of a network's settings that are changed, one after another
MIN_INDEPENDENT_TEXTS = 10  # fewer texts are cut into blocks
POSITIONS_PER_BLOCK = 32
MAX_TEMPLATE_PAIRS = 16  # maximum number of prompts that are answered twice, with and without the chat template
TEMPLATE_CONVENTION = "chat template"
CONFIDENCE_BINS = 5  # bins of the target's confidence; different texts are compared at positions in the same bin
Assessment = Literal["off", "worse", "no measurable effect"]


@dataclass(frozen=True)
class Share:
    """A share, 0 to 1, or a difference of two shares, with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Trial:
    """How the share of accepted tokens changes if one setting of how a draft network is run is changed.

    Args:
        assessment: "off": the share rises, so apply `remedy`; "worse": it falls; else "no measurable effect".
    """

    convention: str
    now: str  # the value that the drafter's folder gives the setting, as text
    tried: str  # the value that was tried, in words
    depth: int  # number of the drafted token, from 1, whose acceptance is compared
    before: Share  # share of these drafted tokens that are accepted with the folder's value
    after: Share  # the same share with the value that was tried
    gain: Share  # `after` minus `before`
    assessment: Assessment
    remedy: Remedy = field(default_factory=Remedy)


@dataclass(frozen=True)
class TokensPerRound:
    """Tokens per round, the bonus token included, with drafts of one size."""

    nodes: int
    depth: int
    as_is: float  # tokens per round if the network is run as its folder says
    after_changes: float | None = None  # tokens per round with all recommended changes; None: not measured

    @property
    def name(self) -> str:
        """Write the size, such as "chain of 3" or "tree of 16, 5 deep"."""
        return f"chain of {self.nodes}" if self.nodes <= self.depth else f"tree of {self.nodes}, {self.depth} deep"


@dataclass(frozen=True)
class Examination:
    """The result of `examine`: what is wrong with how a drafter is run, and how many of its tokens are accepted."""

    drafter: str
    system: str  # the kind of drafter, such as "eagle3"
    layout: str  # format of the drafter's checkpoint folder
    target: str
    prompts: int  # number of prompts with an answer
    positions: int  # number of positions of the answers at which a draft may begin
    pictures: int  # number of prompts with pictures
    template: bool  # whether the prompts went through the chat template
    acceptance: Share  # accepted share of first drafted tokens
    # accepted share of first drafted tokens with the changes of `findings`; None: nothing is to be changed
    after_changes: Share | None
    findings: list[Trial]
    conventions: list[Trial]  # other changes that were tried, one at a time, on top of those of `findings`
    depths: list[float]  # [k]: of the chains whose first k tokens were accepted, the share whose next one is accepted
    rounds: list[TokensPerRound]
    notes: list[str]
    measured_on: dict[str, Any]  # description of the hardware and of software versions


def examine(
    drafter: str | Path,
    model: ExaminedModel,
    prompts: Sequence[DoctorPrompt],
    *,
    template: bool = True,
    tokens: int = MAX_ANSWER_TOKENS,
    log: Callable[[str], None] = lambda line: None,
) -> Examination:
    """Examine a drafter on its target's greedy answers.

    Args:
        drafter: The drafter's folder, name or Hugging Face id, as for `load_drafter`.
        model: The loaded target.
        prompts: The target answers them.
        template: Whether prompts go through the chat template, if the model has one.
        tokens: The most tokens of an answer.
        log: Receives lines of progress.

    Returns:
        The `Examination`.

    Raises:
        InputError: For a drafter that does not fit, for a model of speech, and if no prompt gets an answer.
    """
    target = make_target(model.model)
    if not isinstance(target, DecoderTarget):
        raise InputError(
            f"`model` must be a language model or one that reads images, but is {type(model.model).__name__}. Measure "
            "its drafters with `mmdec bench drafters`."
        )
    loaded = load_drafter(drafter, model.model, "drafter")
    loaded.check(target)
    folder = CheckpointFolder.read(drafter_by_name(drafter, "drafter") or Path(drafter))
    template = template and has_template(model)
    run = _network_run(loaded, model.model)
    inputs = [make_inputs(model, prompt, template) for prompt in prompts]
    layers = {-1}
    if run is not None:
        columns = sum(prompt_inputs["input_ids"].shape[1] + tokens for prompt_inputs in inputs)
        layers |= _layers_to_record(run, folder, model.model, columns)
    needs = Needs(layers=tuple(sorted(layers)), embeds=True)

    def answer(prompt_inputs: dict[str, Any]) -> TargetAnswer | None:
        return answer_prompt(target, prompt_inputs, loaded, tokens, needs)

    log(f"the model answers {len(prompts)} prompts")
    answers = [answer(prompt_inputs) for prompt_inputs in inputs]
    texts = [text for text in answers if text is not None]
    if not texts:
        raise InputError(
            "`data` must have prompts that the model answers, but every answer is empty. Use other prompts."
        )
    pairs: list[tuple[TargetAnswer, TargetAnswer]] = []
    if run is not None and has_template(model):
        log("the model answers some of them " + ("without the chat template" if template else "as chats"))
        answered = [pair for pair in zip(prompts, answers, strict=True) if pair[1] is not None]
        for prompt, text in evenly_spaced(answered, MAX_TEMPLATE_PAIRS):
            other = answer(make_inputs(model, prompt, not template))
            if other is not None and text is not None:
                pairs.append((text, other))
    log("the drafter is measured")
    conventions = _examine_conventions(run, folder, model, loaded, texts, pairs)
    changed = conventions.changed
    log("the answers are decoded with trees")
    rounds, depths = _rounds(model.model, loaded, run, texts)
    drafter_with_changes = None if changed is None else changed.drafter()
    if drafter_with_changes is not None:
        after, depths = _rounds(model.model, drafter_with_changes, changed, texts)
        rounds = [replace(row, after_changes=new.as_is) for row, new in zip(rounds, after, strict=True)]
    hits = _hits(model.model, loaded, texts) if run is None else _first_token_hits(run, texts)
    return Examination(
        drafter=str(drafter),
        system=loaded.name.partition("-")[0] if run is None else run.network.system,
        layout=folder.layout,
        target=target.name,
        prompts=len(texts),
        positions=sum(text.positions for text in texts),
        pictures=sum(_has_pictures(text) for text in texts),
        template=template,
        acceptance=accepted_share(hits),
        after_changes=None if changed is None else accepted_share(_first_token_hits(changed, texts)),
        findings=conventions.findings,
        conventions=conventions.others,
        depths=depths,
        rounds=rounds,
        notes=conventions.notes,
        measured_on=measurement_conditions(
            device=model.model.device, dtype=model.model.dtype, batch=1, threads=torch.get_num_threads()
        ),
    )


def _network_run(drafter: Drafter, model: PreTrainedModel) -> NetworkRun | None:
    """Return what runs the drafter's network as its folder says; None if conventions do not apply to this drafter."""
    network = getattr(drafter, "network", None)
    if not isinstance(network, DraftNetwork) or not network.continues_features:
        return None
    untyped_model: Any = model
    return NetworkRun(network, untyped_model.get_input_embeddings(), untyped_model.get_output_embeddings())


def _layers_to_record(run: NetworkRun, folder: CheckpointFolder, model: PreTrainedModel, columns: int) -> set[int]:
    """Return the target's layers that the network reads, and those that the changes would make it read.

    Args:
        columns: Number of tokens of all texts, which limits how many layers fit into memory.
    """
    layers = {*run.layers, *searches.searchable_layers(model, columns)}
    for variant in variants(run, folder, model, True):
        layers |= {*variant.run.layers}
    return layers


@dataclass(frozen=True)
class _Conventions:
    """What was found about the settings with which a network is run."""

    findings: list[Trial] = field(default_factory=list[Trial])
    others: list[Trial] = field(default_factory=list[Trial])  # other changes that were tried, on top of those
    changed: NetworkRun | None = None  # the network with the changes of the findings; None: nothing is changed
    notes: list[str] = field(default_factory=list[str])


def _examine_conventions(
    run: NetworkRun | None,
    folder: CheckpointFolder,
    model: ExaminedModel,
    drafter: Drafter,
    texts: Sequence[TargetAnswer],
    pairs: Sequence[tuple[TargetAnswer, TargetAnswer]],
) -> _Conventions:
    """Try the settings of a network, and its prompts with and without the chat template.

    Args:
        run: Runs the network as its folder says; None: the drafter has no such network.
        folder: The drafter's folder.
        model: The target.
        drafter: The loaded drafter.
        texts: The target's answers.
        pairs: Some of them, each with an answer to the prompt with the template left out or applied.
    """
    if run is None:
        system = drafter.name.partition("-")[0]
        note = f"Conventions are tried for networks that continue the model's features; {system} is not one."
        return _Conventions(notes=[note])
    findings, others, better = find_remedies(run, folder, model.model, texts)
    changed = better if findings else None
    notes: list[str] = []
    if isinstance(model, LoadedVlm) and not any(_has_pictures(text) for text in texts):
        notes.append("No prompt has a picture: conventions of pictures were not tried.")
    if not texts[0].context.features.keys() >= searches.searchable_layers(model.model, 0):
        notes.append(searches.LAYERS_NOT_SEARCHED)
    if pairs:
        trial = _try_template(better, pairs)
        if trial.assessment == "off":
            findings.append(trial)
        else:
            others.append(trial)
    return _Conventions(findings, others, changed, notes)


def _has_pictures(text: TargetAnswer) -> bool:
    return bool(text.context.visual.any())


def _try_template(run: NetworkRun, pairs: Sequence[tuple[TargetAnswer, TargetAnswer]]) -> Trial:
    """Compare acceptance with and without the chat template.

    The texts differ, so positions are compared at which the target gives its token similar probabilities.

    Args:
        pairs: For some prompts, the text as the prompts are given, and one with the template left out or applied.
    """
    before = [_score_positions(run, text) for text, _ in pairs]
    after = [_score_positions(run, other) for _, other in pairs]
    gain, certain = matched_gain(before, after)
    text, other = pairs[0]
    if text.prompt > other.prompt:  # the template makes a prompt longer
        now, tried = "applied", "left out"
        remedy = "It was probably trained without the chat template. Train it on chats."
    else:
        now, tried = "left out", "applied"
        remedy = "Give prompts through the chat template (`apply_chat_template`, a server's chat endpoint)."
    return Trial(
        convention=TEMPLATE_CONVENTION,
        now=now,
        tried=tried,
        depth=1,
        before=accepted_share([part.hits for part in before]),
        after=accepted_share([part.hits for part in after]),
        gain=gain,
        assessment=assess_gain(gain.value, certain),
        remedy=Remedy(text=remedy),
    )


def _rounds(
    model: PreTrainedModel, drafter: Drafter, run: NetworkRun | None, texts: Sequence[TargetAnswer]
) -> tuple[list[TokensPerRound], list[float]]:
    """Measure tokens per round of chains and trees, and acceptance by depth.

    Args:
        run: Runs the drafter's network, so that chains are counted without decoding; None: everything is decoded,
            and acceptance by depth is not measured.
    """
    positions = sum(text.positions for text in texts)

    def decoded(nodes: int, depth: int) -> TokensPerRound:
        count = sum(len(decoding_rounds(model, drafter, text, nodes, depth)) for text in texts)
        return TokensPerRound(nodes, depth, positions / count)

    trees = [decoded(nodes, depth) for nodes, depth in TREE_SIZES]
    if run is None:
        return [*(decoded(length, length) for length in CHAIN_LENGTHS), *trees], []
    right = [right_tokens(run, text, CHAIN_LENGTHS[-1]) for text in texts]
    chains = [
        TokensPerRound(length, length, positions / sum(chain_rounds(text_tokens, length) for text_tokens in right))
        for length in CHAIN_LENGTHS
    ]
    return [*chains, *trees], acceptance_by_depth(right)


def _hits(model: PreTrainedModel, drafter: Drafter, texts: Sequence[TargetAnswer]) -> list[np.ndarray]:
    """Return for each text (n,): for each of n rounds that draft one token, 1 if it was accepted, else 0."""
    rounds = [decoding_rounds(model, drafter, text, 1, 1) for text in texts]
    return [np.array([round_.accepted[0] for round_ in of_text if round_.drafted[0]], float) for of_text in rounds]


def find_remedies(
    run: NetworkRun, folder: CheckpointFolder, model: PreTrainedModel, texts: Sequence[TargetAnswer]
) -> tuple[list[Trial], list[Trial], NetworkRun]:
    """Find the settings in which a network is run differently from its training, one after another.

    Args:
        run: Runs the network as its folder says.
        model: The target.
        texts: Only layers that they recorded are tried.

    Returns:
        The findings, in order; other changes, tried on top; the changed run (`run` if the LM head is wrong).
    """
    findings, done, first = list[Trial](), set[str](), run
    pictures, recorded = any(_has_pictures(text) for text in texts), texts[0].context.features.keys()
    while True:
        tried = [*variants(run, folder, model, pictures), *searches.search_variants(run, folder, model, texts)]
        todo = [variant for variant in tried if variant.convention not in done and recorded >= {*variant.run.layers}]
        now = [right_tokens(run, text, 2) for text in texts]
        tries = sum(variant.tries for variant in todo)
        rows = [_try(variant, now, texts, tries) for variant in todo]
        best = max((row for row in rows if row.assessment == "off"), key=lambda row: row.gain.value, default=None)
        if best is None or len(done) == MAX_CHANGES:
            lost = _find_wrong_head(first, texts) if _find_wrong_head(run, texts) else None
            # with a wrong LM head, the gains of other changes mean nothing
            return ([lost], [], first) if lost else (findings, rows, run)
        findings.append(best)
        done.add(best.convention)
        run = todo[rows.index(best)].run


def _find_wrong_head(run: NetworkRun, texts: Sequence[TargetAnswer]) -> Trial | None:
    """Return the finding that the network was trained with another LM head; None if its own LM head may be right."""
    fits = searches.fit_head(run, texts)
    if fits is None:
        return None
    before, after = (accepted_share(hits) for hits in fits)
    differences = [y - x for x, y in zip(*fits, strict=True)]
    gain, certain = mean_share(differences), mean_share(differences, 0.01)
    if assess_gain(gain.value, certain) != "off" or after.value < searches.LOST_HEAD_RATIO * before.value:
        return None
    now, remedy = searches.head_remedy(run)
    return Trial("LM head", now, "one fitted to the other half of the texts", 1, before, after, gain, "off", remedy)


def _try(variant: Variant, now: Sequence[list[Tensor]], texts: Sequence[TargetAnswer], count: int) -> Trial:
    """Measure a variant.

    Args:
        now: `now[i][k]`: (n,) bool, whether token k + 1 of text i's chains is right without the variant.
        count: Number of all variants that are tried, for Bonferroni's interval.
    """
    before = [_hits_at_depth(right, variant.depth) for right in now]
    after = [_hits_at_depth(right_tokens(variant.run, text, variant.depth), variant.depth) for text in texts]
    differences = [y - x for x, y in zip(before, after, strict=True)]
    gain, certain = mean_share(differences), mean_share(differences, 0.05 / count)
    return Trial(
        variant.convention,
        variant.now,
        variant.tried,
        variant.depth,
        accepted_share(before),
        accepted_share(after),
        gain,
        assess_gain(gain.value, certain),
        variant.remedy,
    )


def _first_token_hits(run: NetworkRun, texts: Sequence[TargetAnswer]) -> list[np.ndarray]:
    """Return for each text (N,): for each position where a draft can begin, 1 if its first token is right, else 0."""
    return [_hits_at_depth(right_tokens(run, text, 1), 1) for text in texts]


def _hits_at_depth(right: Sequence[Tensor], depth: int) -> np.ndarray:
    """Return (n,): 1 for each chain whose token at `depth` is right, else 0.

    Args:
        right: `right[k]`: (n,) bool, of token k + 1.
    """
    return right[depth - 1].numpy().astype(float) if depth <= len(right) else np.empty(0)


def acceptance_by_depth(right: Sequence[Sequence[Tensor]]) -> list[float]:
    """Compute for each depth, from 1, the share of right tokens among chains whose earlier tokens are all right.

    Args:
        right: `right[i][k]`: (n,) bool, whether token k + 1 of each chain of text i is right.
    """
    shares = []
    for depth in range(CHAIN_LENGTHS[-1]):
        hits = tries = 0
        for chains in right:
            if depth < len(chains):
                size = len(chains[depth])
                reached = torch.ones(size, dtype=torch.bool)
                for earlier in chains[:depth]:
                    reached &= earlier[:size]
                hits, tries = hits + int((reached & chains[depth]).sum()), tries + int(reached.sum())
        shares.append(hits / tries if tries else math.nan)
    return shares


def accepted_share(right: Sequence[np.ndarray]) -> Share:
    """Compute the share of positions that are right, with its interval.

    Args:
        right: For each text (n,), 1 or 0.
    """
    share = mean_share(right)
    return Share(share.value, max(share.low, 0.0), min(share.high, 1.0))


def mean_share(values: Sequence[np.ndarray], level: float = 0.05) -> Share:
    """Compute the mean over all positions, with its interval.

    Texts, or blocks of positions if there are few texts, count as independent: linearised variance of a ratio of sums,
    Student's t. The interval is no narrower than if all positions were independent: a few texts may agree by chance.

    Args:
        values: (n,) of each text.
        level: 1 minus the coverage.
    """
    parts = [text for text in values if len(text)]
    if len(parts) < MIN_INDEPENDENT_TEXTS:
        parts = [part for text in parts for part in np.array_split(text, max(1, len(text) // POSITIONS_PER_BLOCK))]
    sums, counts = np.array([part.sum() for part in parts]), np.array([len(part) for part in parts], float)
    total, spare = counts.sum(), len(parts) - 1
    if spare < 0:
        return Share(math.nan, -math.inf, math.inf)
    value = float(sums.sum() / total)
    if spare < 1:
        return Share(value, -math.inf, math.inf)
    between = ((sums - value * counts) ** 2).sum() * len(parts) / spare
    within = sum(float(((part - value) ** 2).sum()) for part in parts)
    reach = student_t_quantile(1 - level / 2, spare) * math.sqrt(max(between, within)) / float(total)
    return Share(value, value - reach, value + reach)


def student_t_quantile(probability: float, freedom: int) -> float:
    """Compute a quantile of Student's t.

    Args:
        probability: Over 0.5, up to 1.
        freedom: Number of degrees of freedom.

    References:
        Abramowitz and Stegun, 26.7.3 and 26.7.4: the probability of an interval around 0.
    """
    odd = freedom % 2
    first = np.arange(2 + odd, freedom, 2)
    factors = (first - 1) / first  # of each term of the series to the one before it

    def inside(angle: float) -> float:
        """Return the probability between -t and t, where t is tan(angle) times the root of `freedom`."""
        series = 1 + float(np.cumprod(factors * math.cos(angle) ** 2).sum())
        if not odd:
            return math.sin(angle) * series
        more = math.sin(angle) * math.cos(angle) * series if freedom > 1 else 0.0
        return (angle + more) * 2 / math.pi

    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection, to the last bits
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def assess_gain(gain: float, certain: Share) -> Assessment:
    """Return what a gain says of a change.

    Args:
        certain: The gain with an interval for all tried changes.
    """
    if gain >= MIN_GAIN and certain.low > 0:
        return "off"
    return "worse" if gain <= -MIN_GAIN and certain.high < 0 else "no measurable effect"


@torch.inference_mode()
def confidences(run: NetworkRun, text: TargetAnswer) -> np.ndarray:
    """Compute the probabilities (N,) that the target gives to the tokens of its answer from the second on."""
    logits = run.output(text.context.features[-1][0, text.prompt :]).float()
    tokens = torch.tensor(text.answer[1:], device=logits.device)[:, None]
    return logits.softmax(-1).gather(1, tokens)[:, 0].cpu().numpy()


@dataclass(frozen=True)
class ScoredPositions:
    """The N positions of a text at which a draft can begin."""

    hits: np.ndarray  # (N,), 1 where the first drafted token is right, else 0
    confidences: np.ndarray  # (N,), probabilities that the target gives its own tokens


def _score_positions(run: NetworkRun, text: TargetAnswer) -> ScoredPositions:
    return ScoredPositions(_hits_at_depth(right_tokens(run, text, 1), 1), confidences(run, text))


def matched_gain(before: Sequence[ScoredPositions], after: Sequence[ScoredPositions]) -> tuple[Share, Share]:
    """Compute the gain of other texts at positions of similar confidence, with a 95 % and with a 99 % interval.

    Args:
        before: The text of each prompt.
        after: The other text of each prompt.
    """
    pooled = np.concatenate([text.confidences for text in (*before, *after)])
    edges = np.quantile(pooled, np.arange(1, CONFIDENCE_BINS) / CONFIDENCE_BINS)
    weights = np.bincount(np.searchsorted(edges, pooled), minlength=CONFIDENCE_BINS) / len(pooled)
    first, second = _count_in_bins(before, edges), _count_in_bins(after, edges)

    def gain(rows: np.ndarray) -> float:
        (hits, counts), (other_hits, other_counts) = first[rows].sum(0), second[rows].sum(0)
        both = (counts > 0) & (other_counts > 0)
        if not both.any():
            return 0.0
        differences = other_hits[both] / other_counts[both] - hits[both] / counts[both]
        return float((weights[both] * differences).sum() / weights[both].sum())

    every = np.arange(len(before))
    value = gain(every)
    if len(every) < 3:
        unknown = Share(value, -math.inf, math.inf)
        return unknown, unknown
    jackknife = np.array([gain(np.delete(every, index)) for index in every])
    spread = math.sqrt((len(every) - 1) / len(every) * ((jackknife - jackknife.mean()) ** 2).sum())
    reaches = [student_t_quantile(1 - level / 2, len(every) - 1) * spread for level in (0.05, 0.01)]
    near, far = (Share(value, value - reach, value + reach) for reach in reaches)
    return near, far


def _count_in_bins(texts: Sequence[ScoredPositions], edges: np.ndarray) -> np.ndarray:
    """Count (texts, 2, bins) right positions and all positions, in bins of the target's confidence.

    Args:
        edges: The inner edges of the bins.
    """
    counts: list[list[np.ndarray]] = []
    for text in texts:
        bins = np.searchsorted(edges, text.confidences)
        counts.append([np.bincount(bins, text.hits, CONFIDENCE_BINS), np.bincount(bins, minlength=CONFIDENCE_BINS)])
    return np.array(counts)
