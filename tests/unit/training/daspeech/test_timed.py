"""DASpeech in `make train`: which stages run, from what and for how long, with a runner that only pretends."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from safetensors.torch import load_file, save_file

from mmdec.corpora.cvss import read_pairs, vocabulary
from mmdec.training import make_train as allotment
from mmdec.training import timed_run
from mmdec.training.callbacks import Deadline, epochs_that_fit
from mmdec.training.daspeech import timed as schedule
from mmdec.training.daspeech.compare import phone_errors
from mmdec.training.daspeech.export import assemble
from mmdec.training.daspeech.module import DASpeechModule
from mmdec.training.lr_schedule import Schedule
from mmdec.training.timed_run import EXPORT, Allowance, Outcome
from mmdec.types import InputError, MmdecError
from tests.support.tiny_corpus import TinyCorpus, read_table, write_corpus, write_table
from tests.support.tiny_translator import tiny_sizes, tiny_vocoder

ROOT = Path(__file__).parents[4]
SHIPPED, MADE = Path("models/daspeech-phrasebook"), Path("runs/daspeech-phrasebook")
STAGES = ["units", "acoustic", "vocoder", "joint"]
RESERVE = schedule.COMPARISON + EXPORT  # seconds
BATCHES = 10  # that a pretended run sees


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("written"), recordings=1, dev=2)


def module(units: list[str], mu: float = 1.0, seed: int = 0) -> DASpeechModule:
    torch.manual_seed(seed)
    return DASpeechModule(units, size="small", mu=mu, model=tiny_sizes())


class Place:
    """A checkout with a corpus, a clock, and a runner that leaves behind what training would."""

    def __init__(self, folder: Path, corpus: TinyCorpus) -> None:
        (folder / "data").mkdir()
        shutil.copytree(corpus.root, folder / "data" / "corpus")
        (folder / "recipes").symlink_to(ROOT / "recipes")
        self.corpus = TinyCorpus(folder / "data" / "corpus")
        self.units = vocabulary(read_pairs(self.corpus.common_voice, self.corpus.cvss, "train")[0])
        self.now = 1000.0
        self.calls: list[tuple[str, dict[str, Any], str | None]] = []

    def runner(self, name: str, *arguments: str) -> None:
        assert name == "mmdec.training"
        assert arguments[:2] == ("fit", "--config")
        config = yaml.safe_load(Path(arguments[2]).read_text(encoding="utf-8"))
        stage = Path(arguments[2]).parent.name
        resumed = arguments[4] if len(arguments) > 3 else None
        if resumed:
            assert Path(resumed).is_file()
        self.calls.append((stage, config, resumed))
        self.now = max(self.now, self.deadline(config)["at"])
        folder = Path("runs") / stage
        self.checkpoint(folder, stage)
        if stage == "acoustic":
            save_file({"x": torch.zeros(1)}, folder / "tts.safetensors")
        if stage == "vocoder":
            self.vocoder(folder)

    def checkpoint(self, folder: Path, stage: str, batches: int = BATCHES) -> None:
        made = module(self.units, mu=float(stage == "joint"), seed=len(self.calls))
        content = {
            "state_dict": made.state_dict(),
            "hyper_parameters": dict(made.hparams),
            "global_step": batches,
            "loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": {"processed": batches}}}},
        }
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        for name in (f"step={batches}.ckpt", "last.ckpt"):
            torch.save(content, folder / "checkpoints" / name)

    def vocoder(self, folder: Path) -> None:
        vocoder = tiny_vocoder()
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value.contiguous() for name, value in vocoder.state_dict().items()}
        save_file(state, folder / "vocoder.safetensors")
        (folder / "vocoder.json").write_text(json.dumps({"config": asdict(vocoder.config)}), encoding="utf-8")

    def ship(self) -> None:
        """A model in models/, and nothing in runs/."""
        scratch = Path("scratch")
        self.checkpoint(scratch, "joint", batches=7)
        self.vocoder(scratch)
        corpus = self.corpus
        checkpoint = [scratch / "checkpoints" / "step=7.ckpt"]
        assemble(checkpoint, scratch, corpus.common_voice, corpus.cvss, corpus.lexicon, SHIPPED)

    def train(self, minutes: float, fresh: bool = False, runner: Any = None) -> Outcome:
        """By this place's clock."""
        return schedule.train(Allowance(self.now + 60 * minutes, lambda: self.now), runner or self.runner, fresh)

    @staticmethod
    def deadline(config: dict[str, Any]) -> dict[str, Any]:
        return config["trainer"]["callbacks"][-1]["init_args"]

    @property
    def stages(self) -> list[str]:
        return [stage for stage, _, _ in self.calls]

    def config(self, stage: str) -> dict[str, Any]:
        return next(config for name, config, _ in reversed(self.calls) if name == stage)


@pytest.fixture
def place(written: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    made = Place(tmp_path, written)
    monkeypatch.setattr(schedule, "phone_errors", lambda model, data: 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return made


def weights(config: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in config["trainer"]["callbacks"] if c["class_path"].endswith("InitialWeights"))["init_args"]


def test_from_nothing_all_stages_share_the_time(place: Place):
    made = place.train(100)
    assert (made.folder, made.better, made.before) == (MADE, True, None)
    assert (MADE / "model.safetensors").is_file()
    assert not SHIPPED.exists()  # that is for `mmdec promote`
    assert place.stages == STAGES
    assert [resumed for _, _, resumed in place.calls] == [None] * 4
    ends = [place.deadline(config)["at"] - 1000 for _, config, _ in place.calls]
    assert ends == pytest.approx([share * (6000 - RESERVE) for share in (0.55, 0.63, 0.75, 1.0)])
    assert weights(place.config("joint"))["files"] == ["runs/units/network.safetensors"]
    assert set(load_file("runs/units/network.safetensors")) == set(module(place.units, 0.0).network.state_dict())


def test_the_configurations_fit_the_time(place: Place):
    place.train(25)
    units, acoustic, vocoder, joint = (place.config(stage) for stage in STAGES)
    for config in (units, joint):
        assert config["trainer"]["max_steps"] == -1
        assert config["trainer"]["max_epochs"] > 1000
    assert "decay" not in place.deadline(units)
    for config in (units, acoustic, vocoder, joint):
        kept = next(c for c in config["trainer"]["callbacks"] if c["class_path"].endswith("ModelCheckpoint"))[
            "init_args"
        ]
        assert (kept["every_n_epochs"], kept["save_on_train_epoch_end"]) == (1, True)
    assert place.deadline(joint)["decay"]
    assert joint["model"]["init_args"]["decay_from"] is None
    assert units["data"]["init_args"]["steps_per_epoch"] == int((1500 - RESERVE) * 0.055)  # ten epochs, a second a step
    assert acoustic["data"]["init_args"]["steps_per_epoch"] == 11
    recipe = yaml.safe_load(Path("recipes/daspeech/phrasebook/acoustic.yaml").read_text(encoding="utf-8"))
    for config in (acoustic, vocoder):
        assert place.deadline(config)["epochs"] == config["trainer"]["max_epochs"]
    assert acoustic["trainer"]["max_epochs"] == -(-recipe["trainer"]["max_steps"] // 11)


def test_what_has_begun_goes_on(place: Place):
    place.train(100)
    first = {stage: config["data"]["init_args"]["steps_per_epoch"] for stage, config, _ in place.calls}
    place.calls.clear()
    shutil.rmtree(MADE)
    place.now = 0.0
    place.train(3)
    assert place.stages == STAGES  # voice and vocoder had ten steps of their thousands
    resumed = {stage: checkpoint for stage, _, checkpoint in place.calls}
    for stage in STAGES[:3]:
        assert resumed[stage] == f"runs/{stage}/checkpoints/last.ckpt"
        steps = place.config(stage)["data"]["init_args"]["steps_per_epoch"]
        assert steps == first[stage] > 20  # as before, though time is short
    assert resumed["joint"] is None
    assert weights(place.config("joint"))["files"] == [
        "runs/joint/before.safetensors",
        "runs/units/network.safetensors",
    ]
    assert any(name.startswith("tts.") for name in load_file("runs/joint/before.safetensors"))


def test_a_finished_voice_is_left_alone(place: Place):
    for stage in STAGES[:3]:
        place.checkpoint(Path("runs") / stage, stage, batches=10**6)
    place.vocoder(Path("runs/vocoder"))
    save_file({"x": torch.zeros(1)}, Path("runs/acoustic/tts.safetensors"))
    place.train(10)
    assert place.stages == ["units", "joint"]
    shares = [place.deadline(config)["at"] - 1000 for _, config, _ in place.calls]
    assert shares == pytest.approx([(600 - RESERVE) * 0.55 / 0.8, 600 - RESERVE])


def test_a_shipped_model_is_trained_on_in_the_joint_stage(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.ship()
    before = (SHIPPED / "model.safetensors").read_bytes()
    monkeypatch.setattr(schedule, "phone_errors", lambda model, data: 0.5 if model == SHIPPED else 0.4)
    made = place.train(25)
    assert place.stages == ["joint"]
    config = place.config("joint")
    assert weights(config) == {
        "files": [f"models/daspeech-phrasebook/{name}.safetensors" for name in ("encoder", "model")]
    }
    recipe = yaml.safe_load(Path("recipes/daspeech/phrasebook/joint.yaml").read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["lr"] == pytest.approx(recipe["model"]["init_args"]["lr"] / 3)
    assert (made.folder, made.before, made.after, made.better) == (MADE, 50, 40, True)
    assert (SHIPPED / "model.safetensors").read_bytes() == before
    assert (MADE / "model.safetensors").read_bytes() != before
    known = json.loads((MADE / "provenance.json").read_text(encoding="utf-8"))
    assert known["training"]["step"] == BATCHES
    assert (known["compared"]["before"], known["compared"]["after"]) == (50, 40)

    better = (MADE / "model.safetensors").read_bytes()
    made = place.train(25)  # finished: it starts again, from the better one in runs/
    assert [resumed for _, _, resumed in place.calls] == [None, None]
    assert weights(place.config("joint"))["files"][0] == f"{MADE}/encoder.safetensors"
    assert (made.better, made.folder) == (False, Path("runs/daspeech-phrasebook-not-better"))
    assert (MADE / "model.safetensors").read_bytes() == better


def test_a_joint_stage_that_was_cut_off_goes_on(place: Place):
    place.ship()
    place.checkpoint(Path("runs/joint"), "joint", batches=4)
    place.train(25)
    assert [resumed for _, _, resumed in place.calls] == ["runs/joint/checkpoints/last.ckpt"]


def test_what_is_no_better_is_said_to_be(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.ship()
    before = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    monkeypatch.setattr(schedule, "phone_errors", lambda model, data: 0.1 if model == SHIPPED else 0.11)
    made = place.train(25)
    assert (made.before, made.after, made.better) == (pytest.approx(10), pytest.approx(11), False)
    assert made.folder == MADE
    assert (MADE / "model.safetensors").is_file()
    assert {path.name: path.read_bytes() for path in SHIPPED.iterdir()} == before
    place.train(25)
    assert weights(place.config("joint"))["files"][0] == f"{SHIPPED}/encoder.safetensors"  # not from the worse one


def test_the_time_of_the_comparison_is_kept_back(place: Place, monkeypatch: pytest.MonkeyPatch):
    """Both models are measured within the time: as long as the first one took is kept for the second."""
    place.ship()

    def slow(model: Path, data: object) -> float:
        place.now += 100
        return 0.5

    monkeypatch.setattr(schedule, "phone_errors", slow)
    begun = place.now
    place.train(25)
    assert place.deadline(place.config("joint"))["at"] - begun == pytest.approx(1500 - 120 - EXPORT)
    assert place.now - begun <= 1500


def test_features_that_are_not_there_are_computed_for_some(place: Place, monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []

    def few(data: object, time: Allowance, acoustic: bool) -> int:
        asked.append(time.left)
        return 8

    monkeypatch.setattr(schedule, "affordable_rows", few)
    place.train(10)
    assert asked == [pytest.approx(150)]  # a quarter of the time
    assert [place.config(stage)["data"]["init_args"].get("limit") for stage in STAGES] == [8, 8, 8, 8]


def test_fresh_means_from_random_weights_and_keeps_the_old(place: Place):
    place.ship()
    for stage in STAGES:
        place.checkpoint(Path("runs") / stage, stage)
    made = place.train(60, fresh=True)
    assert place.stages == STAGES
    assert [resumed for _, _, resumed in place.calls] == [None] * 4
    assert sorted(path.name for path in Path("runs/before-1").iterdir()) == sorted(STAGES)
    assert (made.before, made.better) == (50, False)  # compared all the same
    place.train(60, fresh=True)
    assert Path("runs/before-2/joint/checkpoints/last.ckpt").is_file()


def test_too_short_a_time_says_what_is_missing(place: Place):
    def slow(name: str, *arguments: str) -> None:
        place.runner(name, *arguments)
        place.now += 300

    place.ship()
    before = (SHIPPED / "model.safetensors").read_bytes()
    made = place.train(3, fresh=True, runner=slow)
    assert (made.folder, made.after) == (None, None)
    assert place.stages == ["units"]
    assert (SHIPPED / "model.safetensors").read_bytes() == before
    assert "too short to train acoustic, vocoder, joint;" in made.trained


def test_a_model_of_other_phones_is_left_as_it_is(place: Place, capsys: pytest.CaptureFixture[str]):
    place.ship()
    lines = read_table(place.corpus.cvss / "train.alignment.tsv")
    write_table(place.corpus.cvss / "train.alignment.tsv", [[name, line.replace("hh:", "h:")] for name, line in lines])
    place.units = vocabulary(read_pairs(place.corpus.common_voice, place.corpus.cvss, "train")[0])
    made = place.train(60)
    assert place.stages == STAGES
    assert (made.folder, made.before) == (MADE, None)
    assert f"The phones of {SHIPPED} differ from those of" in capsys.readouterr().out


def test_a_gpu_takes_the_place_of_both_processes(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    place.train(25)
    recipe = yaml.safe_load(Path("recipes/daspeech/phrasebook/units.yaml").read_text(encoding="utf-8"))
    for stage in STAGES:
        trainer = place.config(stage)["trainer"]
        assert (trainer["accelerator"], trainer["devices"], trainer["strategy"]) == ("gpu", 1, "auto")
    both = recipe["trainer"]["devices"] * recipe["data"]["init_args"]["batch_size"]
    assert place.config("units")["data"]["init_args"]["batch_size"] == both


def test_one_core_runs_one_process(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    place.train(25)
    trainer = place.config("units")["trainer"]
    assert (trainer["accelerator"], trainer["devices"]) == ("cpu", 1)


def test_a_stage_that_fails_stops_everything():
    with pytest.raises(MmdecError, match=r"`python -m mmdec.no_such_module fit` failed with 1"):
        timed_run.run("mmdec.no_such_module", "fit")


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_minutes_must_be_positive(minutes: float):
    with pytest.raises(InputError, match="`minutes` must be positive"):
        allotment.main(minutes)


def test_outside_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="`make train` needs a checkout"):
        allotment.main(1)


def test_without_corpus_and_synthesisers_it_says_what_to_install(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.corpus.lexicon.unlink()  # the tables are there, but the corpus is not finished
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="espeak-ng and flite"):
        schedule.missing()


def test_a_corpus_without_its_lexicon_is_built_to_its_end(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lexicon = place.corpus.lexicon.read_text(encoding="utf-8")
    calls: list[list[str]] = []

    def build(finishes: bool, code: int) -> Callable[..., SimpleNamespace]:
        def built(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
            assert env["MMDEC_PARENT"] == str(os.getpid())  # it ends with this process
            calls.append(command)
            if finishes:
                place.corpus.lexicon.write_text(lexicon, encoding="utf-8")
            return SimpleNamespace(returncode=code)

        return built

    monkeypatch.setattr("shutil.which", lambda program: program)
    schedule.prepare_corpus()
    assert not calls  # finished
    place.corpus.lexicon.unlink()
    monkeypatch.setattr("subprocess.run", build(finishes=False, code=1))
    with pytest.raises(MmdecError, match=r"phrasebook\.py --out .* failed with 1"):
        schedule.prepare_corpus()
    monkeypatch.setattr("subprocess.run", build(finishes=True, code=1))  # single recordings failed
    schedule.prepare_corpus()
    assert "training goes on without them" in capsys.readouterr().out
    assert [command[1:] for command in calls] == 2 * [["data/build/phrasebook.py", "--out", "data/corpus"]]


def test_directory_and_checkpoint_are_judged_alike(place: Place):
    place.ship()
    data = {"common_voice": str(place.corpus.common_voice), "cvss": str(place.corpus.cvss), "jobs": 1}
    data |= {"upsample": 0.25, "min_vertices": 24}
    shipped = phone_errors(SHIPPED, data)
    own = phone_errors(Path("scratch/checkpoints/step=7.ckpt"), data)
    assert shipped == pytest.approx(own, abs=0.3)  # half precision
    assert shipped > 0


class FakeTrainer:
    """As much of a trainer as `Deadline` touches."""

    def __init__(self, max_steps: int = -1) -> None:
        progress = SimpleNamespace(current=SimpleNamespace(processed=0))
        loop = SimpleNamespace(max_steps=max_steps)
        self.fit_loop = SimpleNamespace(epoch_progress=progress, epoch_loop=loop, max_epochs=1000)
        self.strategy = SimpleNamespace(broadcast=lambda value: value)
        self.global_step, self.num_training_batches, self.check_val_every_n_epoch = 0, 5, None

    @property
    def max_steps(self) -> int:
        return self.fit_loop.epoch_loop.max_steps


def epochs(deadline: Deadline, trainer: FakeTrainer, seconds: list[float], made: LightningModule) -> list[int]:
    """Run epochs that take so long; the limits after each."""
    clock = SimpleNamespace(now=0.0)
    limits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmdec.training.callbacks.time", SimpleNamespace(time=lambda: clock.now))
        deadline.on_train_start(trainer, made)  # type: ignore[arg-type]
        for took in seconds:
            clock.now += took
            trainer.fit_loop.epoch_progress.current.processed += 1
            trainer.global_step += 5
            deadline.on_train_epoch_end(trainer, made)  # type: ignore[arg-type]
            limits.append(trainer.fit_loop.max_epochs)
    return limits


def test_a_deadline_counts_the_epochs_that_fit():
    made = LightningModule()
    assert epochs(Deadline(100), FakeTrainer(), [10, 10, 30, 30], made) == [10, 10, 4, 4]
    assert epochs(Deadline(5), FakeTrainer(), [10], made) == [1]  # too late: stop at once
    assert epochs(Deadline(100, epochs=4), FakeTrainer(), [10, 10], made) == [4, 4]
    trainer = FakeTrainer(max_steps=7000)
    epochs(Deadline(100), trainer, [10, 20], made)
    assert trainer.max_steps == 10 + 3 * 5


def test_a_deadline_brings_the_rate_to_zero_in_time():
    made = module(["<s>", "<pad>", "</s>", "<unk>"], mu=0.0)
    made.rate = Schedule("trapezoid", warmup=1)
    epochs(Deadline(100, decay=True), FakeTrainer(), [10], made)
    assert [made.rate(step) for step in (5, 50)] == pytest.approx([1.0, 0.0])
    made.rate = Schedule("trapezoid", warmup=1)
    epochs(Deadline(100), FakeTrainer(), [10], made)
    assert made.rate(50) == 1.0


@pytest.mark.parametrize(
    ("seconds", "epoch", "validation", "done", "every", "more"),
    [
        (100, 10, 50, 0, None, 10),
        (100, 10, 50, 0, 5, 5),
        (100, 10, 20, 4, 5, 6),
        (100, 10, 5, 0, 1, 6),
        (5, 10, 0, 0, 1, 0),
    ],
)
def test_validations_are_part_of_the_time(
    seconds: float, epoch: float, validation: float, done: int, every: int | None, more: int
):
    assert epochs_that_fit(seconds, epoch, validation, done, every) == more
