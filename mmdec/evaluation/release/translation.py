"""How DASpeech models are measured, compared and described when they are promoted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmdec.evaluation.quality.translation import cvss_corpus, evaluate_speech, own_systems
from mmdec.evaluation.release.promotable import Card, Promotable, Report, Setting, percent, rate_cell, split_cell
from mmdec.types import InputError

STRATEGIES = ("lookahead", "autoregressive")


def measure(model: Path, split: str, setting: Setting) -> Report:
    corpus = cvss_corpus(split, setting.corpus, limit=setting.limit)
    report = evaluate_speech(corpus, own_systems(model, STRATEGIES, "cpu", setting.threads))
    return {name: entry for name, entry in report.items() if name != "texts"}  # figures alone go with a model


def score(report: Report) -> tuple[float, ...]:
    """The mean phone error rate of the strategies."""
    rates = [scores["phone_error_rate_nearest"] or scores["phone_error_rate"] for scores in report["systems"].values()]
    if not all(rates):
        raise InputError(f"`corpus` must have alignments of {report['split']}, but has none. Build it whole.")
    return (sum(rate["value"] for rate in rates) / len(rates),)


def table(reports: Sequence[Report]) -> list[str]:
    rows = [
        f"| {split_cell(report)} | {strategy} | {report['n']} | {rate_cell(scores['exact'])} | "
        f"{percent((scores['phone_error_rate_nearest'] or scores['phone_error_rate'] or {}).get('value'))} | "
        f"{scores['bleu']['value']:.1f} |"
        for report in reports
        for strategy, scores in report["systems"].items()
    ]
    head = "| split | decoding | n | exact sentences, any rendering | phone errors | BLEU |"
    return [head, "|---|---|---|---|---|---|", *rows]


TRANSLATION = Promotable(
    system="daspeech",
    corpus=Path("data/corpus"),
    splits=("dev", "test", "test_voices"),
    has_split=lambda corpus, split: (corpus / "cvss_c" / f"{split}.tsv").is_file(),
    measure=measure,
    score=score,
    summary=lambda report: f"{100 * score(report)[0]:.2f} % phone errors",
    card=Card(
        pipeline_tag="audio-to-audio",
        tags=("speech-to-speech-translation", "non-autoregressive", "daspeech"),
        library="mmdec",
        languages=("fr", "en"),
        description=(
            "French speech in, English speech and text out, for a travel phrasebook. A small DASpeech (Fang et al., "
            "NeurIPS 2023): a Conformer encoder, a directed acyclic graph of phones filled in one pass, FastSpeech 2 "
            "on the states along its path, and a vocoder. An autoregressive decoder on the same encoder ships with it."
        ),
        example='out = mmdec.translate_speech("bonjour.wav")\nprint(out.text)\nout.save("hello.wav")',
        training="On synthetic voices alone (`data/README.md`), by `make train`.",
        data="Training and test recordings are synthetic voices.",
        limits=(
            "It knows one domain, short phrases of travellers, in French by espeak-ng, and has one English voice, "
            "flite's `slt`. What people say outside of it comes out as the nearest thing it knows, without "
            "warning.\n\nReal voices were not measured."
        ),
        table=table,
    ),
)
