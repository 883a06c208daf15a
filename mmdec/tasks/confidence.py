"""Confidence: the probability that an output is right, by logistic regression on evidence such as token probabilities.

All outputs have three pieces of evidence from the log-probabilities of the chosen tokens: their mean, the worst stretch
of consecutive tokens, and their number. A transcript adds `rate`, tokens per second of audio, and `repeats`, how well
the text can be compressed. An answer about a picture adds `structure` (whether the picture shows anything) and
`distance` (how different it is from the training pictures); `vision/picture_evidence.py` explains both. A translation
takes its probabilities from one pass of the autoregressive decoder over its units. It adds `differs`, the share of
units for which this decoder prefers another unit; `graph`, the log-probability of the graph decoder's path; and
evidence from a CTC head (`daspeech/evidence.py`).

The weights were fitted on held-out data (`recipes/confidence`) and are stored in the model's folder as
confidence.json. Without that file the confidence is the geometric mean of the token probabilities, which is not
calibrated.

References:
    Platt, "Probabilistic outputs for support vector machines", 1999; here with several inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from mmdec.checks.files import write_atomically
from mmdec.checks.weights import lies_inside
from mmdec.errors import InputError

CONFIDENCE_FILE = "confidence.json"
CONFIDENCE_FORMAT = "mmdec confidence 1"
MAX_FILE_BYTES = 1 << 20  # maximum bytes of confidence.json; a larger file is rejected
CUT_CONFIDENCE = 0.4  # maximum for a text that was cut at a length nobody asked for: what is missing is unknown
# number of consecutive tokens in the worst stretch, which shows a local error in an otherwise certain text
STRETCH_TOKENS = 5
LIKELY_WRONG = 0.5  # people are warned of an output with a lower calibrated confidence
UNCERTAINTY_OFFSET = 0.01  # in nats: added to an uncertainty, which may be 0, before its logarithm is taken

Evidence = Mapping[str, float]


def token_evidence(logprobs: Sequence[float], name: str = "") -> dict[str, float]:
    """Compute evidence from the log-probabilities (nats) of an output's tokens.

    A token's uncertainty is its negative log-probability, at most 30 nats.

    Args:
        name: Prefix of the keys.

    Returns:
        Natural logarithms of three numbers: under "mean" the mean uncertainty, under "worst" the highest mean
        uncertainty of `STRETCH_TOKENS` consecutive tokens, under "count" the number of tokens.
    """
    costs = [max(-value, 0.0) for value in logprobs if not math.isnan(value)] or [math.inf]
    costs = [min(cost, 30.0) for cost in costs]
    mean = sum(costs) / len(costs)
    stretch = min(STRETCH_TOKENS, len(costs))
    worst = max(sum(costs[at : at + stretch]) / stretch for at in range(len(costs) - stretch + 1))
    return {
        f"{name}mean": math.log(mean + UNCERTAINTY_OFFSET),
        f"{name}worst": math.log(worst + UNCERTAINTY_OFFSET),
        f"{name}count": math.log(len(costs)),
    }


@final
@dataclass(frozen=True)
class Calibration:
    """A logistic regression: confidence = sigmoid(bias + sum of weight * evidence).

    Args:
        weights: Name of the evidence -> weight.
        typical: Name of the evidence -> its mean over good development outputs; it replaces evidence that an output
            lacks (such as evidence from images, for a question without images). Default 0.
    """

    weights: Mapping[str, float]
    bias: float
    typical: Mapping[str, float] = field(default_factory=lambda: {})

    def __call__(self, evidence: Evidence) -> float:
        complete = {name: evidence.get(name, self.typical.get(name, 0.0)) for name in self.weights}
        total = self.bias + sum(weight * complete[name] for name, weight in self.weights.items())
        return 1.0 / (1.0 + math.exp(-max(min(total, 60.0), -60.0)))


def read_calibrations(folder: Path | None) -> dict[str, Calibration]:
    """Read the calibrations in a model's folder.

    Returns:
        Kind of decoding (such as "transcript") -> calibration; {} if there are none.

    Raises:
        InputError: If the file is damaged.
    """
    if folder is None or not (folder / CONFIDENCE_FILE).is_file():
        return {}
    path = folder / CONFIDENCE_FILE
    try:
        if not lies_inside(path, folder):
            raise ValueError("it is a link that leads out of the folder")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != CONFIDENCE_FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return {str(kind): _calibration(entry) for kind, entry in content["calibrations"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"`model` must have a {CONFIDENCE_FILE} that was fitted for it, or none, but '{path}' is damaged "
            f"({type(error).__name__}: {error!s:.200}). Download it again, or delete it."
        ) from error


def write_calibrations(folder: Path, calibrations: Mapping[str, Calibration], measured: Mapping[str, Any]) -> Path:
    """Write confidence.json to a folder. If writing fails, an existing file is not changed.

    Args:
        folder: The model's folder.
        calibrations: Kind of decoding -> calibration.
        measured: The calibrations' scores on held-out data, which are stored with them.
    """
    content = {
        "format": CONFIDENCE_FORMAT,
        "calibrations": {
            kind: {"bias": entry.bias, "weights": dict(entry.weights), "typical": dict(entry.typical)}
            for kind, entry in calibrations.items()
        },
        "measured": dict(measured),
    }
    return write_atomically(folder / CONFIDENCE_FILE, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def estimate_confidence(evidence: Evidence, calibrations: Mapping[str, Calibration], kind: str) -> float:
    """Return an output's confidence in [0, 1].

    Args:
        evidence: The output's evidence by name, "mean" of `token_evidence` among it.
        calibrations: Kind of decoding -> calibration.
        kind: The kind of decoding; if it has no calibration, the confidence is the geometric mean of the token
            probabilities.
    """
    if kind in calibrations:
        return calibrations[kind](evidence)
    return math.exp(min(UNCERTAINTY_OFFSET - math.exp(evidence["mean"]), 0.0))


def confidence_error(value: float | None, min_confidence: float | None, argument: str) -> InputError | None:
    """Return an error if the confidence is too low, else None.

    Args:
        value: The confidence; None for a silent input, whose output is accepted.
        min_confidence: The minimum; None: no minimum.
        argument: Name of the call's argument that holds the input.
    """
    if min_confidence is None or value is None or value >= min_confidence:
        return None
    return InputError(
        f"`{argument}` must give an output with a confidence of at least `min_confidence={min_confidence:g}`, but it "
        f"has {value:.2f}. Check that `{argument}` is what the model was made for, or lower `min_confidence`."
    )


def _calibration(entry: Mapping[str, Any]) -> Calibration:
    weights, typical = _numbers(entry["weights"]), _numbers(entry.get("typical", {}))
    bias = float(entry["bias"])
    if not all(math.isfinite(value) for value in (bias, *weights.values(), *typical.values())):
        raise ValueError("a weight is not a finite number")
    return Calibration(weights, bias, typical)


def _numbers(named: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in named.items()}
