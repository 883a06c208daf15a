"""Train a small model of speech tokens and drafters for it, and measure what lossless and LOSSY rules give and harm.

The shipped translator's voice says digits in changing styles. k-means makes codes of its frames. A Llama of a million
parameters learns to continue prompts in CosyVoice 2's order: the texts of two and of four digits, and the codes of the
first two. DFlash and DSpark learn on what it samples, by dflash.yaml. Then held-out digits are said with each drafter
and each rule. A model that says any sentence needs hours of training on hours of speech.

Command:  python recipes/speech_tokens/train.py --output runs/speech_tokens
Hardware: a CPU, one thread. Minutes: 15 on an idle core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mmdec
from mmdec.training.__main__ import main as fit

sys.path.insert(0, str(Path(__file__).parent))
from speech import (  # beside this script
    ENDS,
    ROOT,
    START,
    TASK,
    RepetitionAware,
    Speaker,
    SpeechTokens,
    codebook_of,
    edit_distance,
    frames_of,
    warped_distance,
)

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "".join(sorted({letter for digit in DIGITS for letter in digit} | {" "}))
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}  # CosyVoice 2's in engines
CHAIN = 4  # drafted tokens of a round
TURNS = 2  # seeds with which each way says the digits, all ways in turn
MAX_CODES = 96


@dataclass(frozen=True)
class Said:
    """Two strings of digits in one style, and their frames."""

    texts: tuple[str, str]
    frames: tuple[Tensor, Tensor]  # (N, 80) each


def say_pairs(count: int, seed: int = 0) -> list[Said]:
    """Say `count` pairs of two and four digits, each pair in a style of its own."""
    speaker, rng, python_rng = Speaker(), torch.Generator().manual_seed(seed), random.Random(seed)
    pairs = []
    for _ in range(count):
        first, second = (" ".join(python_rng.choices(DIGITS, k=digits)) for digits in (2, 4))
        style = python_rng.uniform(0.8, 1.25), python_rng.uniform(0.75, 1.3)
        one, other = (frames_of(speaker.say(text, rng, style)) for text in (first, second))
        pairs.append(Said((f"{first} ", second), (one, other)))
    return pairs


def tokenizer_of(codes: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters, marks and codes."""
    letters = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    marks = ["<|pad|>", START, TASK, ENDS[0], *(f"<|s_{code}|>" for code in range(codes))]
    letters.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<|pad|>", eos_token=ENDS[0])


def train(model: Any, rows: list[tuple[list[int], int]], steps: int, batch: int, pad: int) -> None:
    """Train the model on rows of (tokens, number of tokens without loss)."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    python_rng = random.Random(0)
    model.train()
    for step in range(steps):
        chosen = python_rng.sample(rows, min(batch, len(rows)))
        longest = max(len(tokens) for tokens, _ in chosen)
        ids = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens, _ in chosen])
        labels = ids.clone()
        for label, (tokens, given) in zip(labels, chosen, strict=True):
            label[:given], label[len(tokens) :] = -100, -100
        logits = model(input_ids=ids, attention_mask=(ids != pad).long(), use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"  step {step}: loss {loss.item():.2f}", flush=True)
    model.eval()


def build(output: Path, options: argparse.Namespace) -> None:
    """Say the corpus, and write codebook, model, prompts and held-out digits."""
    pairs = say_pairs(options.pairs + options.held)
    codebook = codebook_of(torch.cat([frames for pair in pairs for frames in pair.frames]), options.codes)
    tokenizer = tokenizer_of(options.codes)
    marks = SpeechTokens.of(tokenizer)
    coded = [[torch.cdist(frames, codebook).argmin(1).tolist() for frames in pair.frames] for pair in pairs]
    prompts = [marks.prompt(pair.texts[1], pair.texts[0], codes[0]) for pair, codes in zip(pairs, coded, strict=True)]
    rows = []
    for prompt, codes in zip(prompts[options.held :], coded[options.held :], strict=True):
        ids = tokenizer(prompt)["input_ids"]
        given = len(ids) - len(codes[0])  # marks and texts, which have no loss
        rows.append(([*ids, *(marks.first_code + code for code in codes[1]), marks.end], given))
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": marks.end, "pad_token_id": tokenizer.pad_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **ends))
    train(model, rows, options.steps, 16, int(ends["pad_token_id"]))
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    (output / "prompts").mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts[options.held :][: options.prompts]]
    (output / "prompts" / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    held = {f"frames {at}": pair.frames[1] for at, pair in enumerate(pairs[: options.held])}
    save_file({"codebook": codebook, **held}, output / "speech.safetensors")
    held_out = [{"prompt": prompt, "codes": codes[1]} for prompt, codes in zip(prompts, coded, strict=False)]
    (output / "held.json").write_text(json.dumps(held_out[: options.held]), encoding="utf-8")


def train_drafter(output: Path, name: str, head: str) -> None:
    """Train a drafter by dflash.yaml on what the model samples."""
    recipes = ROOT / "recipes"
    fit(
        [
            "fit",
            f"--config={recipes / 'base.yaml'}",
            f"--config={recipes / 'speech_tokens' / 'dflash.yaml'}",
            f"--trainer.default_root_dir={output / name}",
            f"--model.init_args.network.head={head}",
            f"--data.init_args.base={output / 'model'}",
            f"--data.init_args.corpus={output / 'prompts'}",
            f"--data.init_args.cache_dir={output / 'cache'}",
        ]
    )


class Measurement:
    """Says the held-out digits in several ways, and compares them."""

    def __init__(self, output: Path) -> None:
        self.model: Any = LlamaForCausalLM.from_pretrained(output / "model").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(output / "model")
        self.marks = SpeechTokens.of(self.tokenizer)
        tensors = load_file(output / "speech.safetensors")
        self.codebook = tensors.pop("codebook")
        self.held = json.loads((output / "held.json").read_text(encoding="utf-8"))
        self.frames = [tensors[f"frames {at}"] for at in range(len(self.held))]
        self.prompts = [self.tokenizer(sample["prompt"], return_tensors="pt") for sample in self.held]
        self.distances = torch.cdist(self.codebook, self.codebook)

    def groups(self, members: float) -> mmdec.TokenGroups:
        """Return groups of near codes with `members` codes in the mean."""
        nearest = self.distances.flatten().kthvalue(round(members * len(self.codebook))).values.item()
        return mmdec.TokenGroups.near(self.codebook, nearest, self.model.config.vocab_size, self.marks.first_code)

    def say(self, drafter: Any, seed: int = 0, aware: bool = False, **options: Any) -> dict[str, Any]:
        """Say all held-out digits.

        Args:
            seed: Of the first prompt; the others follow.
            aware: Sample as CosyVoice 2 does itself, by repetition-aware sampling.
            options: Of `mmdec.generate`.

        Returns:
            The codes of each prompt, "rounds" and "tokens" without the pass over the prompts, CPU seconds.
        """
        codes, rounds, tokens, began = list[list[int]](), 0, 0, time.process_time()
        for at, prompt in enumerate(self.prompts):
            length = prompt["input_ids"].shape[1]
            settings = {"max_new_tokens": MAX_CODES, "seed": seed + at, "num_speculative_tokens": CHAIN, **options}
            if aware:
                settings |= {"logits_processor": [RepetitionAware(length)], "top_k": 0}
            made = mmdec.generate(self.model, prompt, drafter, **settings)
            new = made.sequences[0, length:].tolist()
            # a model may also write a letter; it is no code then, and ends the speech
            letters = [place for place, token in enumerate(new) if token < self.marks.end]
            codes.append(self.marks.codes_of(new[: letters[0]] if letters else new))
            rounds, tokens = rounds + len(made.rounds) - 1, tokens + len(new) - 1
        return {"codes": codes, "rounds": rounds, "tokens": tokens, "seconds": time.process_time() - began}

    def harm(self, said: Mapping[str, Any]) -> dict[str, float]:
        """Return how far codes are from the recording: mel distance and code error rate, and how probable the
        model finds them (nats a code)."""
        mel, edits, wanted, loss, count = 0.0, 0, 0, 0.0, 0
        for at, codes in enumerate(said["codes"]):
            mel += warped_distance(self.codebook[codes or [0]], self.frames[at])
            edits, wanted = edits + edit_distance(codes, self.held[at]["codes"]), wanted + len(self.held[at]["codes"])
            ids = torch.cat([self.prompts[at]["input_ids"], torch.tensor([codes]) + self.marks.first_code], 1).long()
            with torch.no_grad():
                logits = self.model(input_ids=ids).logits[0, -len(codes) - 1 : -1].log_softmax(-1)
            loss -= float(logits.gather(1, ids[0, -len(codes) :, None]).sum()) if codes else 0.0
            count += len(codes)
        return {"mel": mel / len(said["codes"]), "code error": edits / wanted, "nats a code": loss / max(count, 1)}


def changed(said: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """Return the edits between two ways to say the digits, as a share of the codes."""
    edits = sum(
        edit_distance(codes, plain_codes) for codes, plain_codes in zip(said["codes"], plain["codes"], strict=True)
    )
    return edits / sum(map(len, plain["codes"]))


def measure(output: Path) -> None:
    """Print and write as JSON what drafters and rules give and harm: means, least and most of the turns."""
    speech = Measurement(output)
    networks = {name: mmdec.load_drafter(output / name / "drafter", speech.model) for name in ("dflash", "dspark")}
    greedy: dict[str, Any] = {"do_sample": False}
    ways: list[tuple[str, Any, dict[str, Any]]] = []
    for title, sampling, drafters in (
        ("greedy", greedy, ("lookup", "recycling", "jacobi", *networks)),
        ("sampled", SAMPLING, ("lookup", "recycling", "jacobi", *networks)),
        ("repetition-aware", {"do_sample": True, "aware": True}, ("lookup", *networks)),
    ):
        ways.append((title, None, sampling))
        for drafter in drafters:
            drawn = {"rule": "traversal"} if sampling["do_sample"] and drafter in networks else {}
            ways.append((f"{title}, {drafter}", networks.get(drafter, drafter), {**sampling, **drawn}))
    ways.append(("sampled, another seed", None, {**SAMPLING, "seed": 1000}))
    relaxations = {f"tolerance {b}": mmdec.Relaxation(tolerance=b) for b in (0.0, 0.1, 0.3, 0.5)}
    relaxations |= {f"groups of {n}": mmdec.Relaxation(groups=speech.groups(n)) for n in (1, 4, 16)}
    relaxations |= {f"{n} draws": mmdec.Relaxation(draws=n) for n in (1, 2, 4)}
    for name, rule in relaxations.items():
        ways.append((f"sampled, dspark, {name}", networks["dspark"], {**SAMPLING, "rule": rule}))
    for n in (2, 4):
        rule = mmdec.Relaxation(draws=n)
        ways.append((f"greedy, dspark, {n} draws", networks["dspark"], {**greedy, "rule": rule}))
    runs: list[list[dict[str, Any]]] = [[] for _ in ways]
    for turn in range(TURNS):
        for way, (_, drafter, options) in zip(runs, ways, strict=True):
            way.append(speech.say(drafter, **{**options, "seed": options.get("seed", 0) + 100 * turn}))
        rows = list(compared(speech, ways, runs))  # after each turn, so that an interrupted measurement has some
        (output / "measured.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(f"turn {turn + 1} of {TURNS}", *(f"  {row}" for row in rows), sep="\n", flush=True)


def compared(
    speech: Measurement, ways: list[tuple[str, Any, dict[str, Any]]], runs: list[list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yield for each way its title, and the mean, least and most of each measure.

    Raises:
        SystemExit: If a lossless way changed the codes.
    """
    plain: dict[str, list[dict[str, Any]]] = {}
    for (title, _, options), way in zip(ways, runs, strict=True):
        bases = plain.setdefault(title.partition(",")[0], way)
        edits = [changed(said, base) for said, base in zip(way, bases, strict=True)]
        if any(edits) and not {"rule", "seed"} & set(options):
            raise SystemExit(f"error: {title} changed the codes")
        harms = [speech.harm(said) for said in way]
        values = {"tokens per round": [said["tokens"] / said["rounds"] for said in way]}
        values |= {"CPU s": [said["seconds"] for said in way], "changed": edits}
        values |= {name: [harm[name] for harm in harms] for name in harms[0]}
        row: dict[str, Any] = {"way": title}
        for name, each in values.items():
            row[name] = [round(value, 3) for value in (sum(each) / len(each), min(each), max(each))]
        yield row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/speech_tokens"))
    parser.add_argument("--pairs", type=int, default=1500, help="of two and four digits to train on")
    parser.add_argument("--held", type=int, default=16, help="pairs that are not trained on")
    parser.add_argument("--codes", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=800, help="that the model continues to teach the drafters")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    if not (options.output / "held.json").exists():
        build(options.output, options)
    for name, head in (("dflash", "none"), ("dspark", "vanilla")):
        if not (options.output / name / "drafter").exists():
            train_drafter(options.output, name, head)
    measure(options.output)


if __name__ == "__main__":
    main()
