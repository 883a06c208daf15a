"""Cards of promoted models, written from what was measured. They format; they compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPLITS = {
    "dev": "unseen sentences, which chose the weights",
    "test": "unseen sentences",
    "test_voices": "unseen sentences and voices",
    "paragraphs": "unseen, read in one go",
    "everyday": "unseen, outside the phrasebook, unseen voices",
}


def speech_card(name: str, files: Mapping[str, int], reports: Sequence[Mapping[str, Any]], facts: Sequence[str]) -> str:
    """Of a DASpeech. files: parameters by file. reports: of `evaluate_speech`. facts: lines of how it was trained."""
    rows = [
        f"| {_split(report)} | {strategy} | {report['n']} | {_rate(scores['exact'])} | "
        f"{_share((scores['phone_error_rate_nearest'] or scores['phone_error_rate'] or {}).get('value'))} | "
        f"{scores['bleu']['value']:.1f} |"
        for report in reports
        for strategy, scores in report["strategies"].items()
    ]
    table = [
        "| split | decoding | n | exact sentences, any rendering | phone errors | BLEU |",
        "|---|---|---|---|---|---|",
    ]
    what = (
        "French speech in, English speech and text out, for a travel phrasebook. A small DASpeech (Fang et al., "
        "NeurIPS 2023): a Conformer encoder, a directed acyclic graph of phones filled in one pass, FastSpeech 2 on "
        "the states along its path, and a vocoder. An autoregressive decoder on the same encoder ships with it."
    )
    call = 'out = mmdec.translate_speech("bonjour.wav")\nprint(out.text)\nout.save("hello.wav")'
    limits = (
        "It knows one domain, short phrases of travellers, in French by espeak-ng, and has one English voice, flite's "
        "`slt`. What people say outside of it comes out as the nearest thing it knows, without warning."
    )
    tags = ["audio-to-audio", "[speech-to-speech-translation, non-autoregressive, daspeech]", "mmdec", "[fr, en]"]
    return _card(name, tags, what, call, limits, files, [*table, *rows], facts, reports[0]["hardware"])


def whisper_card(
    name: str, files: Mapping[str, int], reports: Sequence[Mapping[str, Any]], facts: Sequence[str]
) -> str:
    """Of a Whisper with heads. files: parameters by file. reports: of `evaluate_asr`. facts: how it was trained."""
    rows = []
    for report in reports:
        rounds = next(iter(report["decoding"].values())).get("tokens_per_round")
        rows.append(
            f"| {_split(report)} | {report['n']} | {_rate(report['wer'])} | {_rate(report['wer_raw'])} | "
            f"{_rate(report['exact'])} | {'-' if rounds is None else f'{rounds:.2f}'} |"
        )
    table = [
        "| split | n | word errors, Whisper's normalisation | with case and marks | exact transcripts | "
        "tokens per round, bonus included |",
        "|---|---|---|---|---|---|",
    ]
    what = (
        "English speech to text, at home in a travel phrasebook: a small Whisper (`WhisperForConditionalGeneration`) "
        "with its own tokenizer in Whisper's format, and Medusa heads that draft for it."
    )
    call = 'out = mmdec.transcribe("hello.flac", timestamps="word")\nprint(out.text, out.tokens_per_round)'
    limits = (
        "It knows read English of synthetic voices, a phrasebook's and everyday sentences. Other speech comes out as "
        "the nearest thing it knows, without warning."
    )
    tags = ["automatic-speech-recognition", "[whisper, medusa, speculative-decoding]", "transformers", "[en]"]
    return _card(name, tags, what, call, limits, files, [*table, *rows], facts, reports[0]["hardware"])


def _card(
    name: str,
    tags: Sequence[str],
    what: str,
    call: str,
    limits: str,
    files: Mapping[str, int],
    results: Sequence[str],
    facts: Sequence[str],
    machine: Mapping[str, Any],
) -> str:
    head = ["---", f"language: {tags[3]}", "license: apache-2.0", f"library_name: {tags[2]}"]
    head += [f"pipeline_tag: {tags[0]}", f"tags: {tags[1]}", "---", "", f"# {name}", "", what, ""]
    listed = [f"| `{file}` | {count / 1e6:.2f} M |" for file, count in files.items()]
    measured = (
        f"Measured on {machine['cores']} cores of {machine['cpu']}, {machine['threads']} threads, {machine['dtype']}, "
        f"torch {machine['versions']['torch']}, commit {(machine['commit'] or 'unknown')[:12]}, {machine['date']}. "
        "Training and test recordings are synthetic voices."
    )
    return "\n".join(
        [
            *head,
            *("```python", "import mmdec", "", call, "```", "", "## Files", ""),
            *("| file | parameters |", "|---|---|", *listed, ""),
            *("## How it was trained", "", "On synthetic voices alone (`data/README.md`), by `make train`.", ""),
            *(f"- {fact}" for fact in facts),
            *("", "## Results", "", measured, "", *results, ""),
            *("## Intended use and limits", "", limits, "", "Real voices were not measured.", ""),
            *("## Licences", "", "Weights and text: Apache-2.0.", ""),
        ]
    )


def _split(report: Mapping[str, Any]) -> str:
    return f"`{report['split']}`: {SPLITS.get(report['split'], 'a split')}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _rate(entry: Mapping[str, Any]) -> str:
    if entry.get("value") is None:
        return "-"
    spread = f" [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]" if entry.get("low") is not None else ""
    return f"{100 * entry['value']:.1f} %{spread}"
