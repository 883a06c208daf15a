"""`mmdec eval`: score a model on a split of a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmdec.cli.options import (
    OWN_PROMPT,
    SPEECH_CORPUS,
    SPEECH_MODEL,
    SPEECH_TEXT,
    VLM_MODEL,
    WHISPER_CORPUS,
    WHISPER_MODEL,
    AbsolutePaths,
    AnswerTokens,
    BenchDevice,
    BenchThreads,
    Device,
    Heads,
    Judging,
    Language,
    Limit,
    MaxNewTokens,
    Model,
    OwnPrompt,
    Pictures,
    Plan,
    Questions,
    WhisperCorpus,
    as_verb,
    language_or_none,
    log,
)
from mmdec.cli.reports import JsonTo, Report, deliver_report

app = typer.Typer(
    help="Score a model on a split of a corpus.",
    no_args_is_help=True,
    epilog="Example: mmdec eval asr --split test --limit 50",
)


@app.command(**as_verb("eval speech --split test --limit 50"))
def speech(
    split: Annotated[str, typer.Option(help="Split of the corpus: test, test_voices or dev.")] = "test",
    corpus: Annotated[
        Path, typer.Option(help="Folder of the corpus, or a .tsv or .jsonl with path, split and text (then --text).")
    ] = SPEECH_CORPUS,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Folder of pairs with the translations of a .tsv or .jsonl. Repeat. Default: the default corpus's.",
        ),
    ] = None,
    model: Model = SPEECH_MODEL,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Decoding strategy, as for `mmdec translate`. Repeat it for several."),
    ] = None,
    judge: Judging = None,
    common_voice: Annotated[
        Path | None, typer.Option(help="Folder of Common Voice, if it is not inside the corpus.")
    ] = None,
    cvss: Annotated[Path | None, typer.Option(help="Folder of CVSS, if it is not inside the corpus.")] = None,
    allow_absolute_paths: AbsolutePaths = False,
    limit: Limit = None,
    asr: Annotated[
        bool, typer.Option(help="Compute ASR-BLEU, too: --judge hears, or pocketsphinx where there is training text.")
    ] = True,
    output: Report = None,
    json_to: JsonTo = None,
    device: Device = None,
    threads: BenchThreads = 2,
) -> None:
    """Score speech translation: BLEU, chrF, exact sentences, numbers, phones, ASR-BLEU and latency; with --judge, its
    own translation and a cascade beside ours."""
    from mmdec.checks.arguments import check_threads
    from mmdec.evaluation.quality.judge_transcription import Judge, judged_systems
    from mmdec.evaluation.quality.tables import table
    from mmdec.evaluation.quality.translation import cvss_corpus, evaluate_speech, manifest_corpus, own_systems
    from mmdec.pipelines.translation.load import load

    check_threads(threads)
    common = {"allow_absolute_paths": allow_absolute_paths, "limit": limit}
    if corpus.suffix in (".tsv", ".jsonl"):
        pairs = SPEECH_TEXT if corpus == SPEECH_CORPUS and not text else text or ()
        spoken = manifest_corpus(split, corpus, pairs, **common)
    else:
        spoken = cvss_corpus(split, corpus, common_voice=common_voice, cvss=cvss, **common)
    hearing = None if judge is None else Judge(judge, device, threads)
    systems = own_systems(model, strategy or None, device, threads)
    if hearing is not None:
        systems = systems.beside(judged_systems(hearing, load(model, device)))
    recogniser = spoken.recogniser(log) if asr and hearing is None and spoken.training is not None else hearing
    report = evaluate_speech(spoken, systems, recogniser if asr else None, log)
    deliver_report(report, output, json_to, table)


@app.command(**as_verb("eval asr --split test --limit 50"))
def asr(
    split: Annotated[
        str | None, typer.Option(help="Split of the corpus: test, test_voices, paragraphs or dev; '' for all.")
    ] = "test",
    corpus: WhisperCorpus = WHISPER_CORPUS,
    allow_absolute_paths: AbsolutePaths = False,
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            "--audio", metavar="FILE", help="A recording of your own, its transcript beside it (.txt). Repeat."
        ),
    ] = None,
    model: Model = WHISPER_MODEL,
    heads: Heads = None,
    plan: Plan = "learned",
    plain: Annotated[bool, typer.Option(help="Compare with transformers' greedy decoding, too.")] = True,
    language: Language = "en",
    batch_size: Annotated[int, typer.Option(min=1, help="Recordings in a batch.")] = 1,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = None,
    worst: Annotated[int, typer.Option(min=0, help="List this many transcripts with most errors.")] = 10,
    output: Report = None,
    json_to: JsonTo = None,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> None:
    """Score a Whisper: word and character error rate, tokens per round, seconds and speedup."""
    from mmdec.evaluation.quality.harness import parse_plan
    from mmdec.evaluation.quality.tables import asr_table
    from mmdec.evaluation.quality.transcription import evaluate_asr

    report = evaluate_asr(
        split or None,
        corpus,
        model,
        recordings=audio or (),
        allow_absolute_paths=allow_absolute_paths,
        heads=heads,
        plan=parse_plan(plan),
        plain=plain,
        language=language_or_none(language),
        batch_size=batch_size,
        limit=limit,
        max_new_tokens=max_new_tokens,
        device=device,
        threads=threads,
        worst=worst,
        log=log,
    )
    deliver_report(report, output, json_to, asr_table)


@app.command(**as_verb("eval vlm --questions data/samples/images/samples.tsv"))
def vlm(
    questions: Questions = None,
    images: Pictures = None,
    allow_absolute_paths: AbsolutePaths = False,
    prompt: OwnPrompt = OWN_PROMPT,
    model: Model = VLM_MODEL,
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="As for `mmdec describe`.")] = "auto",
    plan: Plan = "learned",
    swap: Annotated[bool, typer.Option("--swap", help="Show each question another picture of its task.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use this many questions of each task, at equal distances in the list.")
    ] = None,
    max_new_tokens: AnswerTokens = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions in a batch.")] = 1,
    worst: Annotated[int, typer.Option(min=0, help="List this many wrong answers.")] = 10,
    output: Report = None,
    json_to: JsonTo = None,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> None:
    """Score a vision-language model: what is right by task, tokens per round, and the drafter's share of the time."""
    from mmdec.evaluation.quality.description import evaluate_vlm
    from mmdec.evaluation.quality.harness import parse_plan
    from mmdec.evaluation.quality.tables import vlm_table

    report = evaluate_vlm(
        questions,
        images,
        model,
        allow_absolute_paths=allow_absolute_paths,
        prompt=prompt,
        drafter=None if drafter == "none" else drafter,
        plan=parse_plan(plan),
        swap=swap,
        limit=limit,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        device=device,
        threads=threads,
        worst=worst,
        log=log,
    )
    deliver_report(report, output, json_to, vlm_table)
    if report["refused"]:
        raise typer.Exit(1)
