"""Tests the demo without a server: the page builds, its tabs process the samples, and a bad file gives a sentence.

The tests run in separate processes, because Gradio leaves event loops open, which pytest would report as errors.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mmdec
from mmdec.demo import samples
from tests.support.demo_server import true_english
from tests.support.grid import WHOLE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FILES = 500 if WHOLE else 12  # of either kind

CHILD = """
import json, os, sys
from pathlib import Path
from runpy import run_path
import gradio as gr
import numpy as np
import mmdec
from mmdec.demo import describe, page, samples, transcribe, translate
from mmdec.demo.background import updates
from tests.support.odd_files import write_odd
from tests.support.odd_images import write_odd_image
from tests.support.tiny_vlm_folder import write

def last(work, *values):
    told, texts = {}, []
    for update in updates(lambda report: work(report, *values)):
        told |= update
        texts += [update["text"]] if "mm-live" in update.get("text", "") else []
    told |= {"live": texts} if texts else {}
    return {name: value for name, value in told.items() if name not in ("speech", "source")}

def speak(sound, rate, count):
    talk, updates = None, []
    for at in range(0, len(sound), count):
        line, text, talk = transcribe.transcribe_piece((rate, (sound[at : at + count] * 32767).astype("int16")), talk)
        updates.append([line, text])
    return [*updates, list(transcribe.end_recording(talk)[:2])]

def endless():
    talk = None
    for _ in range(70):
        line, text, talk = transcribe.transcribe_piece((16_000, np.zeros(16_000, "int16")), talk)
    return [line, talk.live.seconds]

def music():
    time = np.arange(96_000) / 16_000
    chord = sum(0.1 * np.sin(2 * np.pi * pitch * time) for pitch in (220, 277, 330)) * (np.sin(4 * np.pi * time) > 0)
    return np.concatenate([np.zeros(16_000), chord, np.zeros(32_000)])

sentence = mmdec.audio.load_audio(samples.english()[0].path).numpy()
blocks = page.build_page()
way = translate.default_way()
print(json.dumps({
    "blocks": isinstance(blocks, gr.Blocks),
    "started": run_path("demos/app.py")["serve"] is page.serve,
    "options": {name: str(value) for name, value in page.options(blocks, "127.0.0.1").items()},
    "kept": list(blocks.delete_cache),
    "french": last(translate.sample_work, 0, way),
    "english": last(transcribe.sample_work, 1),
    "street": last(describe.sample_work, 2, list(describe.drafters())[:1]),
    "live": speak(sentence, 16_000, 8_000),
    "live_odd": [transcribe.transcribe_piece(None, None)[:2], transcribe.transcribe_piece((100, sentence), None)[:2],
                 transcribe.end_recording(None)[:2],
                 transcribe.transcribe_piece((48_000, sentence[:, None].repeat(2, 1)), None)[2].live.seconds],
    "music": speak(music(), 16_000, 8_000),
    "seconds": len(sentence) / 16_000,
    "long": endless(),
    "streams": [name for event in blocks.config["dependencies"] for _, name in event["targets"] if name == "stream"],
    "menu": last(describe.sample_work, 0, []),
    "menu_answer": samples.pictures()[0].answer,
    "errors": [last(translate.work, None, way), last(describe.work, None, "What?", []),
               last(describe.work, str(samples.pictures()[2].path), " ", [])],
}))

folder, files = Path(sys.argv[1]), int(sys.argv[2])
toy = write(folder / "tiny") / "toy" / "config.json"
toy.parent.mkdir()
toy.write_text('{"system": "toy"}')
mmdec.register_drafter("toy", loader="docs.examples.toy_drafter:ToyDrafter", auto=True, note="Toy: what followed last.")
describe.DEFAULT_VLM = str(folder / "tiny")
print(json.dumps({"added": describe.drafters()}))
describe.DEFAULT_VLM = "vlm-scenes"
for number in range(files):
    sound = number % 2 == 0
    odd = (write_odd if sound else write_odd_image)(folder, number)
    if os.path.islink(odd.path) or not os.path.isfile(odd.path):  # False, too, for names that no file can have
        continue  # uploads are files
    work = (translate.work if number % 4 == 0 else transcribe.work) if sound else describe.work
    values = ((str(odd.path), way) if number % 4 == 0 else (str(odd.path),)) if sound else (str(odd.path), "What?", [])
    print(json.dumps({"number": number, "story": odd.story, "status": last(work, *values)["status"]}), flush=True)
"""


LIVE = """
import numpy as np
import torch
from mmdec.demo import transcribe
from mmdec.kernels.threads import one_pool

class Live:
    seconds = 0.0

    def feed(self, samples=None):
        print(torch.get_num_threads())
        yield from ()

    end = feed

torch.set_num_threads(3)
with one_pool():
    talk = transcribe.LiveRecording(Live())
    transcribe.transcribe_piece((16_000, np.zeros(8_000)), talk)
    transcribe.end_recording(talk)
"""


def test_the_microphone_decodes_with_all_cpu_threads() -> None:
    done = subprocess.run([sys.executable, "-c", LIVE], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["3", "3"]


TRANSLATIONS = next(iter(true_english().values()))  # of the first sample


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the JSON lines that the process prints: of the tabs, then of each malformed file."""
    folder = tmp_path_factory.mktemp("uploads")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(folder), str(2 * FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def words(html: str) -> str:
    return re.sub("<[^>]*>", "", html).strip()


def test_without_gradio_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['gradio'] = None\nfrom mmdec.cli import main\nsys.argv = ['mmdec', 'demo']\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: The demo needs gradio, which is not installed. Run `pip install 'mmdec[demo]'`.\n"


ADDRESSES = """
import socket
from mmdec.demo import page
from mmdec.errors import MmdecError

class Page:
    def launch(self, server_name, server_port, **_):
        socket.create_server((server_name, server_port)).close()
        print("served")

def fail():
    raise AssertionError("models were loaded")

page.build_page, page.warm_up = Page, fail
with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    for host, number in (("127.0.0.1", port), ("0.0.0.0", port), ("192.0.2.1", port), ("256.1.1.1", port)):
        try:
            page.serve(number, host=host)
        except MmdecError as error:
            print(str(error).replace(str(port), "PORT"))
page.warm_up = lambda: None
page.serve(port)
"""


def test_an_address_that_cannot_be_served_is_refused_before_models_are_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", ADDRESSES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *refused, served = done.stdout.splitlines()
    assert refused[:2] == [
        f"`--port` must be free on {host}, but PORT is in use. Choose another, above 1023."
        for host in ("127.0.0.1", "0.0.0.0")
    ]
    for line, host in zip(refused[2:], ("192.0.2.1", "256.1.1.1"), strict=True):
        assert line.startswith(f"`--host` must be an address of this machine, but is '{host}'.")
    assert served == "served"  # the address is let go before


def test_the_page_and_its_tabs(lines: list[Any]) -> None:
    page = lines[0]
    assert page["blocks"] is True
    assert page["started"] is True
    assert page["kept"] == [600, 3600]
    assert page["options"]["max_file_size"] == "20000000"
    assert page["options"]["allowed_paths"] == f"['{ROOT / 'data' / 'samples'}']"
    french = page["french"]
    assert words(french["status"]).removeprefix("Done. ") in TRANSLATIONS
    assert re.findall("<h4>(.*?)</h4>", french["race"]) == ["Graph", "Graph, reranked", "Verified", "One by one"]
    assert '<span class="mm-output mm-equal">same pieces</span>' in french["race"]
    assert re.findall(r"<b>(\d)</b> pass", french["race"])[:2] == ["1", "2"]
    assert re.search(r"then run [345] times in turn", french["race"])
    assert 'class="mm-dag"' in french["graph"]
    assert re.fullmatch(
        r"Done. With drafts: (.* times (faster|slower)|as fast), same text.", words(page["english"]["status"])
    )
    for answer in (page["english"], page["street"], page["menu"]):
        assert answer["live"]  # told while it was decoded
        assert "per pass" not in answer["text"]  # one figure, in the race
        assert "per pass" in answer["race"]
    assert page["english"]["race"].count("<article") == 2
    assert "mm-equal" in page["english"]["race"]
    assert "mm-word" in page["english"]["text"]
    assert "mm-equal" in page["street"]["race"]
    assert page["street"]["picture"].count("data:image/png") == 1
    assert "EAGLE-3: reads three of the model&#x27;s layers" in page["street"]["race"]
    assert "BURGER costs 9.75" in page["menu_answer"]  # as the picture shows, whatever the model reads
    assert words(page["menu"]["text"]).count(page["menu_answer"]) == 1  # as the answer, or as what is really drawn
    nothing, unseen, unasked = (words(error["status"]) for error in page["errors"])
    assert "Record something" in nothing
    assert "Choose a picture" in unseen
    assert "The question must be text, but is empty." in unasked


def test_the_microphone_is_transcribed_while_somebody_speaks(lines: list[Any]) -> None:
    """Provisional text comes before the end, and the last text is that of the sample."""
    page = lines[0]
    assert page["streams"] == ["stream"]
    texts = [words(text) for _, text in page["live"]]
    assert any(texts[:-1])
    assert texts[-1] == samples.english()[0].text
    assert "mm-note" not in page["live"][-1][1]
    assert words(page["live"][0][0]).startswith("Listening")
    assert words(page["live"][-1][0]).startswith("The recording has ended")
    nothing, slow, none, stereo = page["live_odd"]
    assert nothing[1] == none[1] == slow[1] == ""
    assert "The sample rate must be at least 8000 Hz, but is 100" in words(slow[0])
    assert stereo == pytest.approx(page["seconds"] / 3, abs=0.1)
    line, longest = page["long"]
    assert words(line).startswith("The recording has ended")
    assert longest == pytest.approx(60, abs=2)


def test_music_is_not_shown_as_words(lines: list[Any]) -> None:
    """The model makes words of a chord; their confidence is low."""
    texts = [words(text) for _, text in lines[0]["music"]]
    assert texts[-1] == "The sound is not speech, or not in a language of this model."
    assert set(texts) == {"", texts[-1]}


def test_a_drafter_that_is_registered_is_shown_with_its_note(lines: list[Any]) -> None:
    assert lines[1]["added"] == {"toy": "Toy: what followed last."}


def test_each_malformed_file_is_one_sentence(lines: list[Any]) -> None:
    answers = lines[2:]
    assert len(answers) > FILES
    refused = [answer for answer in answers if 'role="alert"' in answer["status"]]
    assert len(refused) > FILES // 4
    for answer in refused:
        sentence = words(answer["status"]).removeprefix("Cannot do that.").strip()
        assert sentence[0].isupper() or sentence[0] == "“", answer
        assert sentence[-1] in ".?…)", answer
        assert len(sentence) <= 500, answer
        for jargon in ("`", "Traceback", "not your doing", "/uploads"):
            assert jargon not in sentence, answer


@pytest.mark.parametrize("folder", ["demos"])
def test_the_space_names_what_it_needs(folder: str) -> None:
    header = (ROOT / folder / "README.md").read_text(encoding="utf-8").split("---")[1]
    fields = dict(line.split(": ", 1) for line in header.strip().splitlines())
    assert (fields["sdk"], fields["app_file"]) == ("gradio", "app.py")
    assert (ROOT / folder / fields["app_file"]).is_file()
    assert re.fullmatch(r"6\.\d+\.\d+", fields["sdk_version"])
    assert "gradio>=6.1,<7" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = (ROOT / folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    asked = [line for line in lines if not line.startswith("#")]
    assert asked == [f"./mmdec-{mmdec.__version__}-py3-none-any.whl[demo]"]  # a path: no name that others may take
