"""What papers publish, beside ours where a benchmark measured it. Systems, data and hardware differ: read them.

Ours are of the shipped small models on this machine, or of random weights where the paper's size is timed; the papers'
are of large models on GPUs. "Tokens a round" is not one quantity either: SpecVLM's accepted length does not say whether
the bonus counts, ViSpec's leaves it out; ours counts it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from mmdec.evaluation.bench_report import BenchReport, Comparison, Published

Reports = Sequence[BenchReport]
Finder = Callable[[Reports], str]

NO_CVSS = "needs CVSS-C and Common Voice's clips; the shipped model learned a phrasebook"
NO_WEIGHTS = "needs the paper's target model and a GPU; the shipped models are small"
RUN_ASR = "run `mmdec bench asr` and pass its JSON with --beside"


def with_published(report: BenchReport, others: Reports = ()) -> BenchReport:
    """The report with the published figures; `others` fill ours, the report itself, too."""
    reports = (*others, report)
    rows = []
    for row, find, reason in ROWS:
        ours = find(reports)
        rows.append(replace(row, ours=ours, not_measured="" if ours else reason))
    return replace(report, published=tuple(rows))


def _chosen(reports: Reports, bench: str, subject: str, baseline: str, timed: str, kind: str) -> list[Comparison]:
    """Of the last report of this benchmark that has any."""
    for report in reversed(reports):
        rows = [
            row
            for row in report.comparisons
            if (report.bench, row.subject, row.baseline, row.timed, row.kind) == (bench, subject, baseline, timed, kind)
        ]
        if rows:
            return rows
    return []


def _paper_speed(baseline: str) -> Finder:
    def find(reports: Reports) -> str:
        return _span(_chosen(reports, "paper", "DASpeech", baseline, "decoders", "length"))

    return find


def _medusa(reports: Reports) -> str:
    return _span(_chosen(reports, "asr", "medusa", "greedy", "wall clock", "length"))


def _drafter(name: str) -> Finder:
    """Times faster on all questions, and tokens a round."""

    def find(reports: Reports) -> str:
        rows = _chosen(reports, "vlm", name, "greedy", "wall clock", "all")
        if not rows or rows[0].times is None:
            return ""
        tokens = rows[0].tokens_per_round
        return f"{rows[0].times:.2f}" + ("" if tokens is None else f", {tokens:.2f} tok")

    return find


def _nobody(reports: Reports) -> str:
    return ""


def _span(rows: Sequence[Comparison]) -> str:
    """The median over lengths, and the extremes."""
    times = [row.times for row in rows if row.times is not None]
    if not times:
        return ""
    return f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"


def _beside(drafter: str) -> str:
    return f"run `mmdec bench vlm --drafter {drafter}` and pass its JSON with --beside; the 7B target needs a GPU"


DASPEECH, MEDUSA = "Fang et al. 2023, Table 1", "aiola's README, LibriSpeech"
SPECVLM = "SpecVLM, Table 1"
ROWS: tuple[tuple[Published, Finder, str], ...] = (
    (Published("DASpeech lookahead", "times S2UT beam 10, RTX 3090; ours: decoders alone", DASPEECH, "18.53"),
     _paper_speed("S2UT beam 10"), "it is what `mmdec bench paper` times"),
    (Published("DASpeech Joint-Viterbi", "times S2UT beam 10, RTX 3090", DASPEECH, "16.29"), _nobody,
     "`mmdec bench paper` times lookahead alone"),
    (Published("DASpeech lookahead", "ASR-BLEU, CVSS-C fr-en", DASPEECH, "24.71"), _nobody, NO_CVSS),
    (Published("DASpeech Joint-Viterbi", "ASR-BLEU, CVSS-C fr-en", DASPEECH, "25.03"), _nobody, NO_CVSS),
    (Published("Medusa-Linear", "times greedy, test-clean, large-v2", MEDUSA, "1.49"), _medusa, RUN_ASR),
    (Published("Medusa-Linear", "times greedy, test-other, large-v2", MEDUSA, "1.40"), _nobody, NO_WEIGHTS),
    (Published("Medusa-Block", "times greedy, test-clean, large-v2", MEDUSA, "1.37"), _nobody, NO_WEIGHTS),
    (Published("Medusa-Block", "times greedy, test-other, large-v2", MEDUSA, "1.29"), _nobody, NO_WEIGHTS),
    (Published("EagleVLM", "times greedy, LLaVA-1.5-7B, MI250", SPECVLM, "2.01, 3.59 tok"), _drafter("eagle"),
     _beside("eagle")),
    (Published("SpecVLM", "times greedy, LLaVA-1.5-7B, MI250", SPECVLM, "2.11, 3.67 tok"), _drafter("specvlm"),
     _beside("specvlm")),
    (Published("MSD", "times greedy, LLaVA-1.5-7B, at most", "MSD, abstract", "2.29"), _drafter("msd"), _beside("msd")),
    (Published("FLASH", "times greedy, LLaVA-1.5, instructions, A6000", "FLASH's README", "2.55, 2.77 tok"),
     _drafter("flash"), _beside("flash")),
    (Published("ViSpec", "times greedy, LLaVA-1.6-7B", "ViSpec, average at T = 0", "2.58, 2.98 tok"),
     _drafter("vispec"), _beside("vispec")),
    (Published("EAGLE-1", "times greedy, Vicuna-7B, MT-bench", "EAGLE, T = 0", "2.90, 3.94 tok"),
     _nobody, NO_WEIGHTS),
)  # fmt: skip
