"""How speech translators are promoted, that is, replace the shipped one: how they are measured, compared and described.

Translators via French text are tested on everyday French that neural TTS voices read; translators without it, on the
phrasebook corpus. So neither kind replaces the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmdec import hub
from mmdec.evaluation.quality.translation import (
    SpeechCorpus,
    cvss_corpus,
    evaluate_speech,
    manifest_corpus,
    own_systems,
)
from mmdec.evaluation.release.promotable import Card, Promotable, Report, Setting, percent, rate_cell, split_cell
from mmdec.hub.daspeech import layout
from mmdec.types import InputError

STRATEGIES = ("lookahead", "autoregressive")
MANIFEST = "manifest.tsv"
TEXT = ("everyday", "phrasebook")  # folders of sentence pairs, beside the corpus's folder
NOTICES = Path(__file__).with_name("notices.md")  # licences of the parts of translators via French text


def same_layout(run: Path, target: Path, force: bool) -> str:
    """Raise InputError if the run's model and the model to replace are of different kinds (via French text or not),
    because their tests differ.

    run, target: folders of the new and of the old model. force: not used.
    Returns: "", no warning.
    """
    if hub.kind(target) and layout(run) != layout(target):
        raise InputError(
            f"`run` must be measured on the tests of '{target}', which has the layout {layout(target)!r}, but '{run}' "
            f"has {layout(run)!r}. Give its folder another name, or use it where it is: --model {run}."
        )
    return ""


def measure(model: Path, split: str, setting: Setting) -> Report:
    return _figures(cvss_corpus(split, setting.corpus, limit=setting.limit), model, setting)


def measure_heard(model: Path, split: str, setting: Setting) -> Report:
    """Score a translator via French text on one split of the corpus, whose manifest.tsv lists the recordings."""
    folders = [setting.corpus.parent / name for name in TEXT]
    text = [folder for folder in folders if (folder / f"{split}.tsv").is_file()]
    return _figures(manifest_corpus(split, setting.corpus / MANIFEST, text, limit=setting.limit), model, setting)


def _figures(corpus: SpeechCorpus, model: Path, setting: Setting) -> Report:
    report = evaluate_speech(corpus, own_systems(model, STRATEGIES, "cpu", setting.threads))
    # texts are left out of the report, because it is stored with the model
    return {name: entry for name, entry in report.items() if name != "texts"}


def score(report: Report) -> tuple[float, ...]:
    """Return the phone error rate, as mean over strategies. Lower is better."""
    rates = [scores["phone_error_rate_nearest"] or scores["phone_error_rate"] for scores in report["systems"].values()]
    if not all(rates):
        raise InputError(f"`corpus` must have alignments of {report['split']}, but has none. Build it whole.")
    return (sum(rate["value"] for rate in rates) / len(rates),)


def mean_chrf(report: Report) -> float:
    """Return the report's chrF, as mean over strategies. Higher is better."""
    return sum(scores["chrf"]["value"] for scores in report["systems"].values()) / len(report["systems"])


def table_heard(reports: Sequence[Report]) -> list[str]:
    rows = [
        f"| {split_cell(report)} | {strategy} | {report['n']} | {_interval(scores['bleu'])} | "
        f"{_interval(scores['chrf'])} | {rate_cell(scores['exact'])} |"
        for report in reports
        for strategy, scores in report["systems"].items()
    ]
    return ["| split | decoding | n | BLEU | chrF | exact sentences |", "|---|---|---|---|---|---|", *rows]


def _interval(entry: Mapping[str, float]) -> str:
    return f"{entry['value']:.1f} [{entry['low']:.1f}, {entry['high']:.1f}]"


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
    check=same_layout,
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

HEARD = Promotable(
    system="daspeech",
    corpus=Path("data/natural"),
    splits=("dev", "test"),
    has_split=lambda corpus, split: (
        (corpus / MANIFEST).is_file() and any((corpus.parent / name / f"{split}.tsv").is_file() for name in TEXT)
    ),
    measure=measure_heard,
    score=lambda report: (-mean_chrf(report),),
    summary=lambda report: f"chrF {mean_chrf(report):.2f}",
    place=lambda run: Path("daspeech-everyday"),
    check=same_layout,
    card=Card(
        pipeline_tag="audio-to-audio",
        tags=("speech-to-speech-translation", "non-autoregressive", "daspeech"),
        library="mmdec",
        languages=("fr", "en"),
        description=(
            "Everyday French speech in, English speech and text out. A recogniser's encoder, a head that writes French "
            "pieces, a reader, a directed acyclic graph of English pieces filled in one pass (after DASpeech, Fang et "
            "al., NeurIPS 2023), an autoregressive decoder, and a voice."
        ),
        example='out = mmdec.translate_speech("bonjour.wav")\nprint(out.text)\nout.save("hello.wav")',
        training="On synthetic voices and on text: `docs/train/hearing.md`.",
        data="Training and test recordings are synthetic voices; those of `test` were heard in no training recording.",
        limits=(
            "Everyday sentences, said clearly. What it mishears comes out as something else; `out.confidence` says how "
            "sure it is.\n\nReal voices were not measured."
        ),
        table=table_heard,
        licences=NOTICES.read_text(encoding="utf-8").rstrip("\n"),
    ),
)
