"""Measures the drafts of a CTC drafter for a Whisper, by simulated decoding of recordings; writes the drafter's folder.

python -m mmdec.drafters.ctc.training.measure --checkpoint runs/drafts/checkpoints/last.ckpt \\
    --pieces runs/drafts/pieces.json --model MODEL --corpus data/passages/manifest.tsv --split dev \\
    --states runs/drafts --out models/NAME-ctc

Each recording is one window, cut to 30 s. Prints, for trees of 4, 8 and 16 tokens, the tokens per round and the
drafted tokens per round if every round has a draft; and the word error rate of the head's text against the Whisper's
text. Transcripts are stored in `--states`: the Whisper decodes only windows without a stored transcript. `--out`
writes the folder that `drafter=FOLDER` takes. Instead of `--checkpoint` and `--pieces`, `--head` takes such a folder;
then `--ngram` gives its head a new n-gram.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmdec.core.tree import root_only
from mmdec.drafters.ctc.checkpoint import CtcTokenIds, read_ctc, save_ctc, token_merges
from mmdec.drafters.ctc.drafter import CtcDrafter
from mmdec.drafters.ctc.network import CtcHead
from mmdec.drafters.ctc.tokens import FIRST_PIECE, TokenPieces
from mmdec.drafters.ctc.training.data import NO_DISTORTION
from mmdec.drafters.ctc.training.module import load_module
from mmdec.drafters.ctc.training.ngram import count_ngram
from mmdec.drafters.ctc.training.transcripts import (
    JoinedWindow,
    WindowTranscriber,
    keep_transcripts,
    read_draft_vocabulary,
)
from mmdec.errors import InputError, MmdecError
from mmdec.phonetics.piece_ngram import PieceNGram
from mmdec.training.checkpoints import newest_checkpoints
from mmdec.training.corpora.librispeech import read_utterances
from mmdec.training.corpora.text_files import read_training_pairs
from mmdec.training.metrics.text import rate, word_edits
from mmdec.training.stores import FrameStore, TokenStore
from mmdec.types import Context, EncoderContext, Plan, Scores, Verdict
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper

TREE_SIZES = (4, 8, 16)  # numbers of nodes in a drafted tree for which tokens per round are measured


@dataclass(frozen=True)
class RoundCounts:
    """Counts from the simulated decoding of one window.

    They are tokens of the text, rounds of drafting and verifying, and drafted tokens.
    """

    tokens: int
    rounds: int
    drafted: int


def simulate_rounds(
    drafter: CtcDrafter, states: Tensor, prompt: Sequence[int], text: Sequence[int], plan: Plan
) -> RoundCounts:
    """Simulate speculative decoding of a text that is known, and count its rounds.

    Args:
        states: (S, D) the window's encoder states.
        prompt: Token ids of the decoder's prompt.
        text: Token ids of the Whisper's transcript, end token included; a drafted token is accepted if it equals the
            transcript's token.
        plan: The size of each draft.
    """
    ids = torch.tensor([prompt])
    positions = torch.arange(len(prompt))
    encoder = EncoderContext(states[None])
    state = drafter.start(Context(ids, ids >= 0, positions[None, None], positions[-1:] + 1, encoder=encoder))
    scores = Scores(torch.zeros(1, 1, 1))
    done, rounds, drafted = 0, 0, 0
    accepted = [text[0]]  # this token comes from the Whisper's pass over the prompt, without a draft
    while True:
        done += len(accepted)
        row = torch.tensor([accepted])
        verdict = Verdict(row, row[:, -1], row[:, -1] < 0, row, torch.tensor([len(accepted)]))
        drafter.update(state, root_only(row[:, -1]), scores, verdict)
        if done >= len(text):
            return RoundCounts(done, rounds, drafted)
        draft = drafter.propose(state, row[:, -1], plan)
        links = zip(draft.parents[0, 1:].tolist(), draft.tokens[0, 1:].tolist(), strict=True)
        nodes = {link: node for node, link in enumerate(links, 1)}
        node, right = 0, 0
        while done + right < len(text) - 1 and (node, text[done + right]) in nodes:
            node, right = nodes[node, text[done + right]], right + 1
        accepted = list(text[done : done + right + 1])
        rounds, drafted = rounds + 1, drafted + len(nodes)


def ctc_token_ids(whisper: LoadedWhisper, name: str = "", languages: Sequence[str] = ()) -> CtcTokenIds:
    """Collect what a CTC drafter must know of its Whisper's vocabulary.

    This is its size, the ids of the first timestamp and of the end token, and the languages' tokens.

    Args:
        name: The Whisper's public name.
        languages: Codes such as "en" of the languages that the head was trained on; empty: any language.

    Raises:
        InputError: For a language that the model does not know.
    """
    transcriber, language_ids = (
        WindowTranscriber(whisper),
        getattr(whisper.model.generation_config, "lang_to_id", None) or {},
    )
    unknown = [code for code in languages if f"<|{code}|>" not in language_ids]
    if unknown:
        raise InputError(f"`languages` must be codes that the model knows, but has {unknown[0]!r}. Leave them out.")
    tokens = [language_ids[f"<|{code}|>"] for code in languages]
    tasks: dict[str, int] = getattr(whisper.model.generation_config, "task_to_id", None) or {}
    # a translation is English: a head of other languages would draft what was said, not what is written
    refused = [tasks["translate"]] if languages and "en" not in languages and "translate" in tasks else []
    return CtcTokenIds(transcriber.first_time, transcriber.end, whisper.model.config.vocab_size, name, tokens, refused)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: write the drafter's folder, and print its scores.

    Returns:
        Exit code 0, or 2 if a file cannot be read.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, help="a checkpoint, or the folder of some")
    source.add_argument("--head", type=Path, help="the folder of a finished head, instead of --checkpoint and --pieces")
    parser.add_argument("--average", type=int, default=1, help="checkpoints of a folder to average, the last ones")
    parser.add_argument("--pieces", type=Path)
    parser.add_argument(
        "--ngram", type=Path, nargs="*", default=[], help="folders of sentence pairs (data/README.md) to count it over"
    )
    parser.add_argument("--model", required=True, help="the name or folder of the Whisper that the head drafts for")
    parser.add_argument("--corpus", help="LibriSpeech's layout, or a manifest")
    parser.add_argument("--split", default="dev")
    parser.add_argument("--language", default="en")
    parser.add_argument("--states", type=Path, help="the folder of stored states and transcripts")
    parser.add_argument("--threshold", type=float, default=0.0, help="least probability of a drafted token")
    parser.add_argument("--out", type=Path, help="write the drafter's folder here")
    parser.add_argument("--languages", nargs="*", default=[], help="codes of those that the head learned, for --out")
    parser.add_argument("--base", default="", help="the model's public name, for the card")
    parser.add_argument("--trained", default="", help="what the head was trained on, for the card")
    options = parser.parse_args(arguments)
    if options.checkpoint is not None and options.pieces is None:
        parser.error("--checkpoint needs --pieces, the file of its draft vocabulary")
    if options.corpus is not None and options.states is None:
        parser.error("--corpus needs --states, the folder of stored states and transcripts")
    try:
        whisper = load_whisper(options.model)
        head, pieces, ngram = _read_head(options, whisper)
        if options.ngram:
            ngram = count_ngram(_sentences(options.ngram, options.language), pieces)
        tokens = ctc_token_ids(whisper, options.base, options.languages)
        if options.out is not None:
            print(save_ctc(options.out, head, pieces, tokens, ngram, options.trained))
        if options.corpus is not None:
            _measure(options, whisper, CtcDrafter(head, pieces, tokens.first_time, tokens.end, ngram=ngram))
    except MmdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _read_head(options: argparse.Namespace, whisper: LoadedWhisper) -> tuple[CtcHead, TokenPieces, PieceNGram | None]:
    if options.head is not None:
        head, pieces, _, ngram = read_ctc(options.head)
        return head, pieces, ngram
    checkpoint = options.checkpoint
    files = newest_checkpoints(checkpoint, options.average) if checkpoint.is_dir() else [checkpoint]
    pieces = TokenPieces(token_merges(whisper.tokenizer), read_draft_vocabulary(options.pieces))
    return load_module(files)[0].head, pieces, None


def _sentences(folders: Sequence[Path], language: str) -> Iterable[str]:
    """Return the training sentences of folders of sentence pairs: the references for English, else the sources."""
    pairs = [pair for folder in read_training_pairs(folders) for pair in folder]
    texts = (text for pair in pairs for text in (pair.references if language == "en" else [pair.source]))
    return dict.fromkeys(texts)


def _measure(options: argparse.Namespace, whisper: LoadedWhisper, drafter: CtcDrafter) -> None:
    """Print the head's word errors and its tokens per round for each tree size, decoding being simulated."""
    transcriber, folder = WindowTranscriber(whisper), options.states
    store = FrameStore(folder / "states", whisper.model.config.d_model)
    transcripts = TokenStore(folder / "transcripts")
    windows = [JoinedWindow((row,), options.language, 0) for row in read_utterances(options.corpus, options.split)]
    keep_transcripts(windows, whisper, store, transcripts, NO_DISTORTION)
    edits, results = [], {size: list[RoundCounts]() for size in TREE_SIZES}
    for window in windows:
        text, states = transcripts.get(window.name) or [], store.get(window.name)
        if len(text) < 2:
            continue
        for size, rows in results.items():
            plan = Plan(size, size, threshold=options.threshold)
            rows.append(simulate_rounds(drafter, states, transcriber.prompt(options.language), text, plan))
        with torch.inference_mode():
            logits, _ = drafter.head(states[None], torch.tensor([len(states)]))
        path = logits[0].argmax(-1).unique_consecutive().tolist()
        transcript = b"".join(drafter.pieces.bytes(piece) for piece in path if piece >= FIRST_PIECE).decode(
            "utf-8", "replace"
        )
        words = [token for token in text if token < transcriber.first_time]
        edits.append(word_edits(str(whisper.tokenizer.decode(words, skip_special_tokens=True)), transcript))
        each = "  ".join(f"{rows[-1].tokens / max(rows[-1].rounds, 1):5.2f}" for rows in results.values())
        print(f"{each}  {window.name}", flush=True)
    wrong = rate(edits)
    print(f"words wrong: {wrong['value']:.1%} of {wrong['length']}, {len(edits)} windows")
    for size, rows in results.items():
        tokens, rounds, drafted = (sum(getattr(row, name) for row in rows) for name in ("tokens", "rounds", "drafted"))
        print(
            f"trees of {size}: {tokens / max(rounds, 1):.2f} tokens per round, {drafted / max(rounds, 1):.2f} drafted"
        )


if __name__ == "__main__":
    sys.exit(main())
