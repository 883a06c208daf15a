"""Tests the pages of the site: their Python code, notebooks, commands, files, links and drawings. Also tests the Python
code of the README and of the model cards.

Each Python block and each notebook runs in a separate process, one after another. The processes are forks of one that
has imported torch, transformers and mmdec (tests/docs/forked.py). Hugging Face ids lead to tiny models
(tests/docs/fake_hub.py). Commands are only parsed; those of the README are run by test_readme.py.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import soundfile
import typer
import yaml

import mmdec
from mmdec import __version__, cli
from tests.conftest import RATE
from tests.docs.fake_hub import write_cache
from tests.docs.forked import results_of
from tests.docs.sample_files import put_samples

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
TEXT = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
}
CARDS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "models").rglob("README.md"))]
}
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
FENCED = re.compile(r"^```(\{?[\w-]*\}?)[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
# they speak of what once was
HISTORY = {"docs/changelog.md", *(f"docs/log/{path.name}" for path in (DOCS / "log").glob("*.md"))}
WISHES = {  # what a newcomer wants, and the page that tells how
    "translate a folder": "guide/translate.md",
    "get subtitles": "guide/transcribe.md",
    "describe a picture": "guide/describe.md",
    "speed up my own Llama": "guide/language_models.md",
    "train heads for my own Whisper": "train/whisper.md",
    "train a drafter for my own LLaVA": "train/vlm.md",
    "add a drafter": "add_a_drafter.md",
}


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def code_of(path: Path) -> str:
    """Return a notebook's code; IPython, which every notebook has and this environment has not, is a stand-in."""
    return "import tests.docs.ipython_stand_in\n" + "\n".join(
        "".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"
    )


BLOCKS = {
    f"{name}:{number}": code
    for name, text in (TEXT | CARDS).items()
    for number, (language, code) in enumerate(FENCED.findall(text))
    if language == "python"
}
PIECES = BLOCKS | {str(path.relative_to(ROOT)): code_of(path) for path in NOTEBOOKS}
COMMANDS = sorted(
    {
        line.partition("  #")[0].strip()
        for text in TEXT.values()
        for language, block in FENCED.findall(text)
        if language in ("bash", "")
        for line in block.replace("\\\n", " ").splitlines()
        if line.partition("  #")[0].strip()
    }
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return every piece, run in a folder that looks like a checkout."""
    place = tmp_path_factory.mktemp("pages")
    cache = write_cache(place / "cache", " ".join(PIECES.values()))
    jobs = []
    for number, (name, code) in enumerate(PIECES.items()):
        checkout = place / str(number)
        folder = checkout / "docs" / "notebooks" if name.endswith(".ipynb") else checkout
        folder.mkdir(parents=True)
        for linked in ("data", "models", "recipes"):
            (checkout / linked).symlink_to(ROOT / linked)
        put_samples(folder, code)
        jobs.append({"name": name, "code": code, "folder": str(folder)})
    done = results_of(jobs, cache)
    return {job["name"]: {**done[job["name"]], "folder": Path(job["folder"])} for job in jobs}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_python_blocks_of_pages_run(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["returncode"] == 0, f"{name}\n{result['stderr']}"
    assert bool(result["stdout"].strip()) == ("print(" in PIECES[name] or "on_text=" in PIECES[name])
    for saved in re.findall(r'\.save\("(\w+\.wav)"\)', PIECES[name]):
        assert soundfile.info(result["folder"] / saved).samplerate == RATE


def test_the_readme_and_each_model_card_have_python_blocks() -> None:
    assert {name.partition(":")[0] for name in BLOCKS} >= set(CARDS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_its_outputs(path: Path, results: dict[str, dict[str, Any]]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert path.stat().st_size < 400_000
    identities = [cell["id"] for cell in content["cells"]]
    assert len(set(identities)) == len(identities)
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in code)
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    now = results[str(path.relative_to(ROOT))]["stdout"].splitlines()
    lines = [line for output in outputs for line in "".join(output.get("text", ())).splitlines()]
    assert lines
    assert [line for line in lines if not re.search(r"\d", line) and line not in now] == []  # but for figures


@pytest.mark.parametrize(("name", "sounds", "pictures"), [("speech", 2, 2), ("whisper", 1, 1), ("vision", 0, 3)])
def test_notebook_shows_sounds_graph_and_race(name: str, sounds: int, pictures: int) -> None:
    shown = [
        data
        for cell in cells(DOCS / "notebooks" / f"{name}.ipynb")
        for output in cell.get("outputs", ())
        for data in output.get("data", {}).items()
    ]
    assert sum("data:audio/" in "".join(value) for _, value in shown) == sounds
    assert sum(kind in ("image/png", "image/jpeg") for kind, _ in shown) == pictures


def parse(words: list[str]) -> None:
    """Parse as the command line would, down to the subcommand. Raises for a wrong option or value."""
    command, context = typer.main.get_command(cli.app), None
    while True:
        context = command.make_context(words[0], words[1:], parent=context)
        if not hasattr(command, "commands"):
            return
        rest = [*context._protected_args, *context.args]
        name, command, words = command.resolve_command(context, rest)
        words = [name, *words]


def mmdec_words(command: str) -> list[str] | None:
    """Return the command's words after the program; None where it is another program's."""
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "mmdec"]:
        return ["mmdec", *words[3:]]
    return words if words[:1] == ["mmdec"] else None


@pytest.mark.parametrize("command", [line for line in COMMANDS if mmdec_words(line)])
def test_command_lines_parse(command: str) -> None:
    words = mmdec_words(command)
    assert words is not None
    parse(words)


@pytest.mark.parametrize(
    "wrong", ["mmdec translate a.wav --outptu out", "mmdec bench nothing", "mmdec eval asr --limit x"]
)
def test_a_wrong_command_line_is_detected(wrong: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|not a valid|be a whole number"):
        parse(shlex.split(wrong))


def option_names(module: str, name: str) -> set[str]:
    """List a class's options: arguments of `__init__`, its bases' too, and fields of its dataclass of options.

    Read from the sources: importing the training packages would cost more than all pages.
    """
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))
    sources = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mmdec")
        for alias in node.names
    }
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return option_names(sources[name], name) if name in sources else set()
    result: set[str] = set()
    inherited = {base.id for base in classes[name].bases if isinstance(base, ast.Name)}
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and name.endswith("Options"):
            result.add(node.target.id)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            result |= {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
            inherited |= {
                part.id for part in ast.walk(node) if isinstance(part, ast.Name) and part.id.endswith("Options")
            }
    return result.union(*(option_names(module, other) for other in inherited))


def test_option_names_are_read() -> None:
    names = option_names("mmdec.drafters.eagle.training.modules", "SpecVlmModule")
    assert {"cost", "lr", "start"} <= names
    assert "loss" not in names


@pytest.mark.parametrize("command", [line for line in COMMANDS if "mmdec.training fit" in line])
def test_training_commands_name_a_recipe_and_its_options(command: str) -> None:
    words = shlex.split(command)
    assert words[4:7] == ["--config", "recipes/base.yaml", "--config"]
    base, recipe = (yaml.safe_load((ROOT / path).read_text(encoding="utf-8")) for path in (words[5], words[7]))
    for word in words[8:]:
        option, _, value = word.partition("=")
        assert value, word
        part, *rest = option.removeprefix("--").split(".")
        if part == "trainer":
            assert rest[0] in {**base["trainer"], **recipe["trainer"]}, word
        else:
            assert rest[0] == "init_args"
            module, _, name = recipe[part]["class_path"].rpartition(".")
            assert rest[1] in option_names(module, name), word


def test_options_in_the_text_of_training_pages_exist() -> None:
    recipes = {
        "whisper": "medusa/librispeech",
        "vlm": "vlm_drafters/mix665k/msd",
        "specvlm": "vlm_drafters/mix665k/specvlm",
    }
    for page, path in recipes.items():
        recipe = yaml.safe_load((ROOT / "recipes" / f"{path}.yaml").read_text(encoding="utf-8"))
        text = next(text for name, text in TEXT.items() if name.endswith(f"/{page}.md") and "init_args" in text)
        for part, option in re.findall(r"`--(model|data)\.init_args\.(\w+)", text):
            module, _, name = recipe[part]["class_path"].rpartition(".")
            assert option in option_names(module, name), f"{page}: {option}"


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if re.match(r"python (data/|recipes/|-m mmdec\.(?!training fit))", line)]
)
def test_scripts_have_the_options_that_are_shown(command: str) -> None:
    words = shlex.split(command)
    path = ROOT / (words[1] if words[1] != "-m" else Path(*words[2].split(".")))
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            assert f'"{name}"' in source or f'"{name[2:]}"' in source, f"{word} in {path.name}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    shown = [line for line in COMMANDS if line.startswith("make ")]
    assert shown
    assert [line for line in shown if line.split()[1] not in targets] == []


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    kinds = r"(make |mmdec |python -m mmdec|python data/build/|python recipes/|pip install \.|pip install '\.\[)"
    code = r"(mmdec\.register_drafter|drafter = mmdec\.load_drafter)"  # of add_a_drafter.md, unmarked
    assert [line for line in COMMANDS if not re.match(f"{kinds}|{code}", line)] == []


@pytest.mark.parametrize("name", sorted(set(TEXT) - HISTORY))
def test_named_files_exist(name: str) -> None:
    paths = re.findall(r"\b((?:mmdec|tests|recipes|docs|data/build|data/samples)/[\w./-]+\.\w+)", TEXT[name])
    paths = [path for path in paths if "*" not in path]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def links(path: Path) -> list[str]:
    """Targets of a page's links and pictures, those that lead out of the site left out."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    result = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in result if not re.match(r"[a-z]+://|mailto:", link)]


def anchors(path: Path) -> set[str]:
    """List the anchors of a page's headings, as MyST and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_internal_links_resolve(path: Path) -> None:
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def clicks() -> dict[Path, int]:
    """How many clicks from the first page each page is, by the links in the text."""
    first = DOCS / "index.md"
    far, waiting = {first: 0}, [first]
    while waiting:
        page = waiting.pop(0)
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_file() and target not in far:
                far[target] = far[page] + 1
                waiting.append(target)
    return far


def test_important_pages_are_two_clicks_away() -> None:
    far = clicks()
    assert {wish: far.get(DOCS / page, 99) for wish, page in WISHES.items() if far.get(DOCS / page, 99) > 2} == {}


def test_every_page_is_in_the_contents() -> None:
    listed = {DOCS / "index.md"}
    for path in PAGES:
        for kind, block in FENCED.findall(path.read_text(encoding="utf-8")):
            if kind == "{toctree}":
                listed |= {path.parent / f"{line}.md" for line in block.splitlines() if line and line[0] != ":"}
    assert set(PAGES) == listed


def test_the_reference_lists_every_public_name() -> None:
    page = TEXT["docs/api/calls.md"]
    absent = [name for name in mmdec.__all__ if not name.startswith("__") and f"mmdec.{name}" not in page]
    assert absent == []


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("path", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda path: path.stem)
def test_drawings_are_readable_in_light_and_dark(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    for part in ("title", "desc"):
        assert root.findtext(f"{space}{part}")
    style = root.findtext(f"{space}style") or ""
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    for scheme in (light, dark):
        fills = dict(re.findall(r"\.(\w+) \{ fill: (#\w{6})", scheme))
        for ground in ("card", "box", "good", "bad", "faint"):
            assert contrast(fills["ink"], fills[ground]) >= 4.5, (ground, fills)
        assert contrast(fills["soft"], fills["card"]) >= 4.5


def test_the_citation_file_is_complete() -> None:
    """The required fields of CFF 1.2.0, no others than it knows, and this version."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    required = {"cff-version", "message", "title", "authors"}
    assert required <= set(citation) <= required | {"type", "version", "license", "keywords", "references"}
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", __version__)
    assert citation["authors"] == [{"name": "the mmdec authors"}]
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_complete(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert set(form) == {"blank_issues_enabled"}
        return
    assert form["name"]
    assert form["description"]
    identities = [part["id"] for part in form["body"]]
    assert len(set(identities)) == len(identities)
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes")
        assert part["attributes"]["label"]
        assert ("options" in part["attributes"]) == (part["type"] in ("dropdown", "checkboxes"))
