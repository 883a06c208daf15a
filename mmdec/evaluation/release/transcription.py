"""How Whispers with Medusa heads are promoted, that is, replace the shipped one: how they are measured, compared and
described."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmdec.evaluation.quality.transcription import evaluate_asr
from mmdec.evaluation.release.promotable import Card, Promotable, Report, Setting, rate_cell, split_cell

PLAN = (16, 6)  # nodes and depth of each tree: fixed, because a learned plan depends on the machine's speed


def measure(model: Path, split: str, setting: Setting) -> Report:
    """Score a Whisper with its Medusa heads on a split."""
    return evaluate_asr(
        split,
        setting.corpus,
        model,
        plan=PLAN,
        plain=False,
        limit=setting.limit,
        device="cpu",
        threads=setting.threads,
    )


def score(report: Report) -> tuple[float, ...]:
    """Return the figures by which models are compared, lower is better: the word error rate and, for equal rates, minus
    the tokens per round."""
    return float(report["wer"]["value"]), -_tokens_per_round(report)


def summary(report: Report) -> str:
    return f"{100 * report['wer']['value']:.2f} % word errors, {_tokens_per_round(report):.3f} tokens per round"


def table(reports: Sequence[Report]) -> list[str]:
    rows = []
    for report in reports:
        tokens = next(iter(report["decoding"].values())).get("tokens_per_round")
        rows.append(
            f"| {split_cell(report)} | {report['n']} | {rate_cell(report['wer'])} | {rate_cell(report['wer_raw'])} | "
            f"{rate_cell(report['exact'])} | {'-' if tokens is None else f'{tokens:.2f}'} |"
        )
    head = (
        "| split | n | word errors, Whisper's normalisation | with case and marks | exact transcripts | "
        f"tokens per round, {PLAN[0]} drafts, bonus included |"
    )
    return [head, "|---|---|---|---|---|---|", *rows]


def _tokens_per_round(report: Report) -> float:
    return float(next(iter(report["decoding"].values())).get("tokens_per_round") or 1.0)


TRANSCRIPTION = Promotable(
    system="whisper",
    corpus=Path("data/english"),
    splits=("dev", "test", "test_voices", "paragraphs", "everyday"),
    has_split=lambda corpus, split: (corpus / split).is_dir(),
    measure=measure,
    score=score,
    summary=summary,
    card=Card(
        pipeline_tag="automatic-speech-recognition",
        tags=("whisper", "medusa", "speculative-decoding"),
        library="transformers",
        languages=("en",),
        description=(
            "English speech to text, at home in a travel phrasebook: a small Whisper "
            "(`WhisperForConditionalGeneration`) with its own tokenizer in Whisper's format, and Medusa heads that "
            "draft for it."
        ),
        example='out = mmdec.transcribe("hello.flac", timestamps="word")\nprint(out.text, out.tokens_per_round)',
        training="On synthetic voices alone (`data/README.md`), by `make train`.",
        data="Training and test recordings are synthetic voices.",
        limits=(
            "It knows read English of synthetic voices, a phrasebook's and everyday sentences. Other speech comes out "
            "as the nearest thing it knows, without warning.\n\nReal voices were not measured."
        ),
        table=table,
    ),
)
