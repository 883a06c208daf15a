"""Builds the corpus of drawn scenes that the small vision-language model is trained on.

python data/build/scenes.py --out data/scenes          # resumable; the same seed gives the same files

Every picture is drawn from a scene graph, and all text about it is derived from the graph, so that each claim can be
checked. A graph's split is its hash's. `test_fonts` prints graphs of the test split in fonts that training never sees,
`test_templates` asks about them in words that it never reads. The layout is that of llava_v1_5_mix665k: a JSON list of
{id, image, conversations} beside a folder of images; "turns" adds each answer's task, core and claims, "graph" what the
picture shows, "prints" where each printed character stands, and {split}.cells.npy, (N, 64, 8, 2) uint8, what its
patches show. Fonts: see scene_fonts.
"""

import argparse
import io
import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scene_fonts
import scene_object_talk
import scene_objects
import scene_print_talk
import scene_prints
from PIL import Image
from scene_canvas import CLASSES, TINTS
from scene_wordings import Turn, in_passing
from splits import share
from tables import whole

SHARD = 500  # scenes that are written together
SALT = "mmdec scenes 1"
DEV_SHARE, TEST_SHARE = 0.03, 0.09
QUESTIONS = 14  # at most, of one picture, beside its descriptions
KINDS = {
    "room": 24,
    "street": 14,
    "menu": 15,
    "timetable": 12,
    "ticket": 8,
    "tag": 6,
    "sign": 9,
    "clock": 6,
    "thermometer": 2,
    "map": 4,
}
# The number of each sample picture: scenes of the test split of which models/vlm-scenes answers all questions rightly.
# They were chosen for that; the model's card has how often it is right.
SAMPLES = {"menu": 11, "timetable": 1, "street": 370, "room": 4, "ticket": 4, "map": 5}
SPLITS = ("dev", "test", "test_fonts", "test_templates", "train")
Graph = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """A picture with what is known and said of it. pixels: (128, 128, 3) uint8; cells: (64, 8, 2) uint8; prints: each
    printed text with the patch of each of its characters."""

    graph: Graph
    pixels: np.ndarray
    cells: np.ndarray
    prints: list[tuple[str, list[int]]]
    turns: tuple[Turn, ...]


def split_of(graph: Graph) -> str:
    """Whatever the seed: by what the picture shows, not by how it is drawn."""
    value = share(SALT, json.dumps(graph, sort_keys=True))
    return "dev" if value < DEV_SHARE else "test" if value < DEV_SHARE + TEST_SHARE else "train"


def draw_graph(kind: str, draw: random.Random) -> Graph:
    """One scene graph of a kind."""
    return scene_objects.draw_graph(kind, draw) if kind in ("room", "street") else scene_prints.KINDS[kind][0](draw)


def draw_scene(split: str, seed: int, number: int, kind: str | None = None, hurried: bool = True) -> Scene:
    """The scene of this number. kind: None draws one. hurried: some questions are typed carelessly."""
    draw = random.Random(f"scenes {seed} {split} {number}")
    kind = kind or draw.choices(list(KINDS), list(KINDS.values()))[0]
    graph = draw_graph(kind, draw)
    while split_of(graph) != split.partition("_")[0]:
        graph = draw_graph(kind, draw)
    font = draw.choice(scene_fonts.HELD_OUT if split == "test_fonts" else scene_fonts.TRAIN)
    if kind in ("room", "street"):
        canvas = scene_objects.draw_picture(graph, draw)
    else:
        canvas = scene_prints.KINDS[kind][1](graph, draw, font)
    picture = canvas.finish()  # before the talk: both draw
    held = split == "test_templates"
    turns = talk(graph, draw, held)
    if hurried and not held:
        turns = [replace(turn, question=in_passing(turn.question, draw.random())) for turn in turns]
    return Scene(graph, *picture, tuple(turns))


def talk(graph: Graph, draw: random.Random, held: bool) -> list[Turn]:
    """A description or two, then some of the questions."""
    about = scene_object_talk if graph["kind"] in ("room", "street") else scene_print_talk
    described = list(about.descriptions(graph, draw, held))
    asked = list(about.questions(graph, draw, held))
    draw.shuffle(asked)
    return described[: 2 if draw.random() < 0.4 else 1] + asked[:QUESTIONS]


def record(scene: Scene, name: str, image: str) -> dict[str, Any]:
    """The corpus's row of a scene."""
    conversations = []
    for number, turn in enumerate(scene.turns):
        mark = "" if number else "<image>\n"
        conversations += [{"from": "human", "value": mark + turn.question}, {"from": "gpt", "value": turn.answer}]
    turns = [turn.record() for turn in scene.turns]
    said = {"conversations": conversations, "turns": turns}
    return {"id": name, "image": image, **said, "graph": scene.graph, "prints": scene.prints}


def write_shard(root: Path, split: str, seed: int, shard: int, count: int) -> None:
    """Draw the scenes of a shard that is not there yet. Its rows come last and make it whole."""
    part = root / "parts" / split / f"{shard:05d}"
    rows = part.with_suffix(".jsonl")
    if rows.is_file():
        return
    folder = root / "images" / split / f"{shard:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    lines, cells = [], []
    for number in range(shard * SHARD, min((shard + 1) * SHARD, count)):
        scene = draw_scene(split, seed, number)
        image = folder / f"{number:07d}.png"
        image.write_bytes(png(scene.pixels))
        cells.append(scene.cells)
        lines.append(json.dumps(record(scene, f"{split}-{number:07d}", str(image.relative_to(root / "images")))))
    write_whole(part.with_suffix(".npy"), array_bytes(np.stack(cells)))
    write_whole(rows, ("\n".join(lines) + "\n").encode())


def png(pixels: np.ndarray) -> bytes:
    """As a file's bytes."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def array_bytes(array: np.ndarray) -> bytes:
    """As an .npy file's bytes."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    with whole(path) as partial:
        partial.write_bytes(content)


def join(root: Path, split: str, shards: int) -> None:
    """The split's JSON list and cells out of its shards."""
    parts = [root / "parts" / split / f"{shard:05d}" for shard in range(shards)]
    rows = ",\n".join(
        line for part in parts for line in part.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    )
    cells = np.concatenate([np.load(part.with_suffix(".npy"), allow_pickle=False) for part in parts])
    write_whole(root / f"{split}.cells.npy", array_bytes(cells))
    write_whole(root / f"{split}.json", f"[{rows}]\n".encode())


def write_samples(folder: Path, seed: int) -> None:
    """The sample pictures, and what is asked of them as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["file\ttask\tquestion\tanswer"]
    for kind, number in SAMPLES.items():
        scene = draw_scene("test", seed, number, kind, hurried=False)
        write_whole(folder / f"{kind}.png", png(scene.pixels))
        chosen = {turn.task: turn for turn in reversed(scene.turns)}
        lines += [
            f"{kind}.png\t{t.task}\t{t.question}\t{t.answer}" for t in sorted(chosen.values(), key=lambda t: t.task)
        ]
    write_whole(folder / "samples.tsv", ("\n".join(lines) + "\n").encode())


def main() -> int:
    """Exit code: 0, or 2 where the fonts are missing or the folder is another build's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="build the corpus in this folder, or go on there")
    parser.add_argument("--samples", type=Path, help="write the sample pictures into this folder, and nothing else")
    parser.add_argument("--scenes", type=int, default=120_000, help="of the training split (default 120000)")
    parser.add_argument("--held", type=int, default=3000, help="of each other split (default 3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    arguments = parser.parse_args()
    if missing := scene_fonts.missing_fonts():
        print(missing, file=sys.stderr)
        return 2
    if arguments.samples:
        write_samples(arguments.samples, arguments.seed)
        return 0
    if arguments.out is None:
        parser.error("--out or --samples is needed")
    settings = {"seed": arguments.seed, "salt": SALT, "classes": CLASSES, "tints": TINTS}
    kept = arguments.out / "scenes.json"
    text = json.dumps(settings, indent=1)
    if kept.is_file() and kept.read_text(encoding="utf-8") != text:
        print(f"{arguments.out} was begun with other settings, see {kept}. Choose another folder.", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(kept, text.encode())
    counts = {split: arguments.scenes if split == "train" else arguments.held for split in SPLITS}
    work = [
        (arguments.out, split, arguments.seed, shard, count)
        for split, count in counts.items()
        for shard in range(-(-count // SHARD))
    ]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for done, _ in enumerate(pool.map(write_shard, *zip(*work, strict=True)), 1):
            if done % 20 == 0:
                print(f"{done} of {len(work)} shards", flush=True)
    for split, count in counts.items():
        join(arguments.out, split, -(-count // SHARD))
    return 0


if __name__ == "__main__":
    sys.exit(main())
