r"""Measures what requests gain by sharing the passes of a model, and what a lone request loses.

python recipes/measure/scheduler.py --language-model SMOLLM2 --whisper whisper-tiny.en --recordings *.wav

Rows (`--rows` chooses some): 8 clients of a server that chat, or send 10 s of speech each; the first text of a request
that arrives while 7 others run; a long recording cut at pauses; many recordings of mixed lengths; a lone request in the
scheduler. Each row times the two ways in turn, A B A B, for `--minutes` at most, but at least one pair after a first
run that does not count. Texts must be equal, except those of the recording that is cut. CPU time is that of the
whole process, its server and clients included; it depends less on other programs than the wall clock does.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import soundfile
import torch
import uvicorn
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import mmdec
from mmdec.bench.pairing import CPU_TIME, prepare_device
from mmdec.bench.prompts import INSTRUCTIONS, ChatPrompt
from mmdec.bench.report import WALL_CLOCK, hardware_line
from mmdec.core.scheduler import Scheduler
from mmdec.core.steps import run_steps
from mmdec.errors import exit_on_error
from mmdec.generation.generate import GenerateCall
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.hub.provenance import measurement_conditions
from mmdec.io.audio import SAMPLE_RATE, load_audio
from mmdec.serving.app import build_app
from mmdec.serving.engines import EngineOptions, load_engine
from mmdec.serving.server import Server, ServerLimits

CLIENTS = 8
CHAT_TOKENS = 64  # maximum number of new tokens of a chat
LONG_ANSWER = 512  # maximum number of new tokens of an answer that runs while another request arrives
OPEN_QUESTIONS = 3  # at the end of `INSTRUCTIONS`; their answers are long
CLIP_SECONDS = 10  # length of a client's recording
DECODER = "decoder"  # the kind of measured time that counts a transcript's decoder and drafter
SHORTEST, LONGEST = 2, 40  # seconds of the pieces that are cut from long recordings


@dataclass
class Run:
    """One timed run: its texts, and its seconds by kind."""

    texts: list[str]
    seconds: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Row:
    """Two ways to do the same work.

    `times` is the time of `before` divided by that of `after`; for a delay, it is the other way round.
    """

    name: str
    before: Callable[[], Run]
    after: Callable[[], Run]
    warm_up: Callable[[], object] | None = None  # None: one run of each way
    equal: bool = True  # whether both ways must return the same texts
    delay: bool = False


def timed(work: Callable[[], list[str]]) -> Run:
    """Run `work`, and time it."""
    cpu, wall = time.process_time(), time.perf_counter()
    texts = work()
    return Run(texts, {WALL_CLOCK: time.perf_counter() - wall, CPU_TIME: time.process_time() - cpu})


def measure(row: Row, minutes: float) -> list[str]:
    """Run both ways in turn until the time is up, and return the lines of the table.

    Raises:
        RuntimeError: If texts differ.
    """
    end = time.monotonic() + 60 * minutes
    if row.warm_up is None:
        row.before()
        row.after()
    else:
        row.warm_up()
    pairs = list[tuple[Run, Run]]()
    longest = 0.0
    while not pairs or time.monotonic() + longest < end:
        began = time.monotonic()
        pairs.append((row.before(), row.after()))
        longest = max(longest, time.monotonic() - began)
        if row.equal and pairs[-1][0].texts != pairs[-1][1].texts:
            raise RuntimeError(f"{row.name}: the texts of both ways differ.")
    return [_line(row, kind, pairs) for kind in pairs[0][0].seconds]


def _line(row: Row, kind: str, pairs: Sequence[tuple[Run, Run]]) -> str:
    before, after = ([run.seconds[kind] for run in side] for side in zip(*pairs, strict=True))
    ratios = [b / a if row.delay else a / b for a, b in zip(before, after, strict=True)]
    times = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    cells = [row.name, kind, f"{median(before):.3f}", f"{median(after):.3f}", times, str(len(pairs))]
    return f"| {' | '.join(cells)} |"


@contextmanager
def served(model: str, threads: int) -> Iterator[httpx.Client]:
    """Serve a model in a thread of this process. Yields a client of the server."""
    torch.set_num_threads(1)  # as `make_server`: only the thread that decodes has a pool of CPU threads
    name, engine = load_engine(model, EngineOptions(threads=threads), "cpu", None)
    server = Server({name: engine}, ServerLimits(rows=CLIENTS), threads=threads)
    running = uvicorn.Server(uvicorn.Config(build_app(server), port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        port = running.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=600.0, trust_env=False) as client:
            yield client
    finally:
        running.should_exit = True
        thread.join()
        torch.set_num_threads(threads)


def client_runs(ask: Callable[[int], str]) -> tuple[Callable[[], Run], Callable[[], Run]]:
    """Return two runs of the requests of all clients: one after another, and at the same time.

    Args:
        ask: Sends the request of a client, and returns the text of the answer.
    """

    def together() -> list[str]:
        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(ask, range(CLIENTS)))

    return lambda: timed(lambda: list(map(ask, range(CLIENTS)))), lambda: timed(together)


def chat_body(prompt: ChatPrompt, tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"messages": [*prompt.messages], "max_tokens": tokens, "temperature": 0, **more}


def chats(options: argparse.Namespace) -> Iterator[Row]:
    """8 clients chat with a language model."""
    prompts = INSTRUCTIONS[:: len(INSTRUCTIONS) // CLIENTS]  # of all kinds
    with served(options.language_model, options.threads) as client:

        def ask(number: int) -> str:
            answer = client.post("/chat/completions", json=chat_body(prompts[number], CHAT_TOKENS)).raise_for_status()
            return answer.json()["choices"][0]["message"]["content"]

        yield Row(f"{CLIENTS} chats, {CHAT_TOKENS} new tokens", *client_runs(ask))


def clips(options: argparse.Namespace) -> Iterator[Row]:
    """8 clients send 10 s of speech each."""
    sounds = [sound for sound in map(load_audio, options.recordings) if len(sound) >= CLIP_SECONDS * SAMPLE_RATE]
    files = [_wav(sounds[number % len(sounds)][: CLIP_SECONDS * SAMPLE_RATE]) for number in range(CLIENTS)]
    with served(options.whisper, options.threads) as client:

        def ask(number: int) -> str:
            answer = client.post("/audio/transcriptions", files={"file": ("a.wav", files[number])})
            return answer.raise_for_status().json()["text"]

        yield Row(f"{CLIENTS} recordings of {CLIP_SECONDS} s", *client_runs(ask))


def first_text(options: argparse.Namespace) -> Iterator[Row]:
    """The first text of a chat, alone and while 7 others run."""
    with served(options.language_model, options.threads) as client:

        def pieces(prompt: ChatPrompt) -> Generator[str]:
            body = chat_body(prompt, LONG_ANSWER, stream=True)
            with client.stream("POST", "/chat/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                        if delta.get("content"):
                            yield delta["content"]

        def arrive() -> list[str]:
            with closing(pieces(INSTRUCTIONS[0])) as answer:
                return [next(answer)]

        def arrive_alone() -> Run:
            run = timed(arrive)
            _wait_until_idle(client)
            return run

        def beside() -> Run:
            stop, begun = threading.Event(), threading.Semaphore(0)

            def read(number: int) -> None:
                with closing(pieces(INSTRUCTIONS[-1 - number % OPEN_QUESTIONS])) as answer:
                    for index, _ in enumerate(answer):
                        if not index:
                            begun.release()
                        if stop.is_set():
                            return

            with ThreadPoolExecutor(CLIENTS) as others:
                running = [others.submit(read, number) for number in range(CLIENTS - 1)]
                try:
                    for _ in running:
                        begun.acquire()
                    run = timed(arrive)
                    if any(answer.done() for answer in running):
                        raise RuntimeError("an answer ended before the other request had its first text.")
                finally:
                    stop.set()
            _wait_until_idle(client)
            return run

        yield Row(f"first text beside {CLIENTS - 1} chats", arrive_alone, beside, delay=True)


def _wait_until_idle(client: httpx.Client) -> None:
    """Wait until no request is decoded."""
    while client.get(str(client.base_url.copy_with(path="/health"))).json()["decoding"]:
        time.sleep(0.01)


def long(options: argparse.Namespace) -> Iterator[Row]:
    """A long recording window by window, without earlier text, and cut at pauses."""
    sound = max(map(load_audio, options.recordings), key=len)
    call = {"condition_on_prev_tokens": False, **whisper_call(options)}

    def run(at_pauses: bool) -> Run:
        out = list[mmdec.Transcript]()

        def transcribe() -> list[str]:
            out.append(mmdec.transcribe(sound, cut_at_pauses=at_pauses, **call))
            return [out[0].text]

        made = timed(transcribe)
        made.seconds[DECODER] = out[0].timings["decoder"] + out[0].timings["drafter"]
        return made

    name = f"a recording of {len(sound) // SAMPLE_RATE} s"
    yield Row(name, lambda: run(False), lambda: run(True), equal=False)


def folder(options: argparse.Namespace) -> Iterator[Row]:
    """Recordings of mixed lengths, one by one and as a list."""
    sounds, draws = list(map(load_audio, options.recordings)), random.Random(0)
    sounds = [_cut(sounds[number % len(sounds)], draws) for number in range(options.count)]
    call = whisper_call(options)

    def one_by_one() -> list[str]:
        return [mmdec.transcribe(sound, **call).text for sound in sounds]

    def together(count: int | None = None) -> list[str]:
        return [transcript.text for transcript in mmdec.transcribe(sounds[:count], **call)]

    yield Row(
        f"{len(sounds)} recordings, {sum(map(len, sounds)) // SAMPLE_RATE} s in all",
        lambda: timed(one_by_one),
        lambda: timed(together),
        warm_up=lambda: together(CLIENTS),
    )


def _cut(sound: Tensor, draws: random.Random) -> Tensor:
    """Return a recording (T,), or if it is long a piece of it."""
    length = int(draws.uniform(SHORTEST, LONGEST) * SAMPLE_RATE)
    if len(sound) <= LONGEST * SAMPLE_RATE:
        return sound
    start = draws.randrange(len(sound) - length)
    return sound[start : start + length]


def lone(options: argparse.Namespace) -> Iterator[Row]:
    """A request of a random model of 30 M parameters, in the loop alone and in the scheduler."""
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(8192, (1, 32))
    length = {"max_new_tokens": CHAT_TOKENS, "min_new_tokens": CHAT_TOKENS, "do_sample": False, "pad_token_id": 0}

    def run(work: Callable[[Any], object]) -> Run:
        prepared = GenerateCall.from_options(model, Speculation(DecodingOptions(drafter=None)), length).prepare(prompt)
        return timed(lambda: [str(work(prepared) or prepared.sequences.tolist())])

    def scheduled(prepared: Any) -> None:
        scheduler = Scheduler()
        task = scheduler.add(prepared.steps)
        with torch.no_grad():
            scheduler.run()
        if task.error is not None:
            raise task.error

    def run_prepared(prepared: Any) -> None:
        for _ in run_steps(prepared.steps):
            pass

    yield Row("a lone request", lambda: run(run_prepared), lambda: run(scheduled))


def whisper_call(options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the arguments of `mmdec.transcribe`."""
    model = mmdec.load(options.whisper, "cpu")
    return {"model": model, "sample_rate": SAMPLE_RATE, "batch_size": CLIENTS, "threads": options.threads}


def _wav(sound: Tensor) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound.numpy(), SAMPLE_RATE, format="WAV")
    return file.getvalue()


ROWS: Mapping[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "chats": chats,
    "clips": clips,
    "first_text": first_text,
    "long": long,
    "folder": folder,
    "lone": lone,
}
NEEDS = {  # row -> the argument without which it cannot run
    "chats": "language_model",
    "clips": "recordings",
    "first_text": "language_model",
    "long": "recordings",
    "folder": "recordings",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language-model", help="folder or Hugging Face id of a language model with a chat template")
    parser.add_argument("--whisper", default="whisper-tiny.en", help="a shipped name, a folder or a Hugging Face id")
    parser.add_argument("--recordings", type=Path, nargs="*", help="sound files; the longest is the long recording")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=[*ROWS])
    parser.add_argument("--minutes", type=float, default=4.0, help="for each row")
    parser.add_argument("--count", type=int, default=100, help="recordings of the row `folder`")
    parser.add_argument("--threads", type=int, default=2, help="torch's CPU threads")
    options = parser.parse_args(arguments)
    for name in options.rows:
        if name in NEEDS and not getattr(options, NEEDS[name]):
            parser.error(f"the row {name} needs --{NEEDS[name].replace('_', '-')}")
    device = prepare_device("cpu", options.threads)
    facts = measurement_conditions(device=device, dtype=torch.float32, batch=CLIENTS, threads=options.threads)
    print(hardware_line(facts), flush=True)
    print("\n| what | time | before, s | shared, s | times | pairs |\n|---|---|---|---|---|---|", flush=True)
    for name in options.rows:
        for row in ROWS[name](options):
            print("\n".join(measure(row, options.minutes)), flush=True)


if __name__ == "__main__":
    with exit_on_error():
        main()
