"""DASpeech's part of `make train`: four stages of training, which share the time.

The stages are speech to phones, the acoustic model (voice), the vocoder, and joint training, whose learning rate falls
to zero at the end of the time. Earlier trainings in runs/ are resumed. If runs/ has none, but there is an earlier
model, only the joint stage runs: it starts from the model's weights and trains everything but the vocoder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mmdec.audio import load_audio
from mmdec.training.checkpoints import last_checkpoint, newest, read_checkpoint
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.cvss import SpeechPair, read_pairs, vocabulary
from mmdec.training.daspeech.acoustic import EnglishSpeech, acoustic_targets, save_network
from mmdec.training.daspeech.compare import phone_errors
from mmdec.training.daspeech.corpus import FeatureStore, extract
from mmdec.training.daspeech.export import assemble, load_module
from mmdec.training.timed_run import (
    RUNS,
    Allowance,
    Outcome,
    Recipe,
    Runner,
    TimedStage,
    epoch_steps,
    fit_machine,
    numbered,
    read_recipe,
    run_builder,
    run_folder,
    set_deadline,
    start_model,
    train_stages,
    write_outcome,
)
from mmdec.types import InputError, MmdecError

SAMPLE = 24  # number of recordings from which the time for all is estimated


def affordable_rows(data: dict[str, Any], time: Allowance, acoustic: bool) -> int | None:
    """Estimate for how many training rows features can be computed in this time. Returns at least 48, or the number of
    rows if it is smaller; None if the time is enough for all rows.

    data: arguments of `SpeechTranslationData`. acoustic: whether acoustic targets of English speech are computed, too.
    """
    common_voice, cvss = Path(data["common_voice"]), Path(data["cvss"])
    admission = Admission(data.get("allow_absolute_paths", False))
    rows, _ = read_pairs(common_voice, cvss, "train", admission=admission)
    heard = FeatureStore.ready(cvss.parent / "cache" / "train", [row.clip for row in rows])
    spoken = not acoustic or EnglishSpeech.ready(cvss, "train", admission=admission)
    if heard and spoken:
        return None
    some = rows[:: max(1, len(rows) // SAMPLE)]
    each = 0.0
    extract(str(some[0].clip))  # this first call is not timed, because it includes one-time set-up
    if not heard:
        each += time.spent_on(lambda: sum(len(extract(str(row.clip))) for row in some))[1] / data.get("jobs", 2)
    if not spoken:
        each += time.spent_on(lambda: sum(map(_spoken, some)))[1]
    most = int(max(time.left, 0.0) * len(some) / max(each, 1e-9))
    return None if most >= len(rows) else max(most, min(len(rows), 2 * SAMPLE))


def _spoken(row: SpeechPair) -> int:
    try:
        return len(acoustic_targets(load_audio(row.recording), row.alignment).mel)
    except InputError:  # a bad recording: it will be reported later
        return 0


NAME, MODEL = "speech translation", "daspeech-phrasebook"
RECIPES = Path("recipes/daspeech/phrasebook")
CORPUS = Path("data/corpus")
PAIRS = CORPUS / "cv" / "fr", CORPUS / "cvss_c"
BUILDER = Path("data/build/phrasebook.py")
PREPARED = 0.25  # maximum share of the time that computing missing features may take
COMPARISON = 20.0  # seconds reserved for scoring the new model, if there is no earlier model
SHARES = {"units": 0.55, "acoustic": 0.08, "vocoder": 0.12, "joint": 0.25}  # each stage's share of the time
RESULTS = {"acoustic": "tts.safetensors", "vocoder": "vocoder.safetensors"}  # files that finished stages write
NETWORK = RUNS / "units" / "network.safetensors"
JOINT = RUNS / "joint"


def train(time: Allowance, runner: Runner, fresh: bool = False) -> Outcome:
    """Train until the time is used up, write the model to runs/, and compare it with the earlier model.

    runner: runs a Python module in a child process.
    fresh: begin with random weights. The folders of earlier trainings in runs/ are then renamed, not used.
    """
    data = stage_recipe("joint")["data"]["init_args"]
    if fresh:
        set_aside()
    earlier = known_model()
    start = None if fresh or last("units").is_file() else earlier
    stages = ["joint"] if start else unfinished()
    limit = affordable_rows(data, time.part(PREPARED), acoustic=True)
    if limit is not None:
        print(f"features of {limit} training rows are computed first: there is no time for more", flush=True)
    return train_stages(
        NAME,
        (lambda: phone_errors(earlier, data)) if earlier else None,
        COMPARISON,
        [timed(stage, start, limit) for stage in stages],
        lambda _, before: export(before, data, stages),
        time,
        runner,
    )


def timed(stage: str, start: Path | None, limit: int | None) -> TimedStage:
    """Describe a training stage for `train_stages`. stage: a key of `SHARES`. start: the model that joint training
    begins from; None: the results of the earlier stages. limit: use at most this many training rows."""

    def configure(time: Allowance) -> Recipe:
        if stage == "joint":
            begin_joint(start)
        recipe = configuration(stage, time, start)
        if limit is not None:
            recipe["data"]["init_args"]["limit"] = min(limit, recipe["data"]["init_args"].get("limit") or limit)
        return recipe

    def finish() -> None:
        if stage == "joint":
            (JOINT / "finished").touch()
        if stage == "units":
            save_network(load_module(newest(last(stage).parent, 1))[0].network, NETWORK)

    origin = f"from {start}" if start else "from random weights"
    return TimedStage(stage, SHARES[stage], RUNS / stage, origin, configure, finish)


def last(stage: str) -> Path:
    return RUNS / stage / "checkpoints" / "last.ckpt"


def stage_recipe(stage: str) -> Recipe:
    return read_recipe(RECIPES / f"{stage}.yaml")


def known_model() -> Path | None:
    """Return the folder of the earlier model: the one in runs/ if it was an improvement, else the shipped one. None if
    there is none, or if its phones are not those of the corpus."""
    folder = start_model(MODEL)
    if not (folder / "model.safetensors").is_file():
        return None
    rows, _ = read_pairs(*PAIRS, "train")
    if json.loads((folder / "units.json").read_text(encoding="utf-8")) != vocabulary(rows):
        print(f"The phones of {folder} differ from those of {CORPUS}: training begins from random weights.", flush=True)
        return None
    return folder


def unfinished() -> list[str]:
    """Return the names of the stages to train. The acoustic model and the vocoder are left out if they have been
    trained for their recipe's number of steps."""

    def done(stage: str) -> bool:
        if not (RUNS / stage / RESULTS[stage]).is_file():
            return False
        found = last_checkpoint([last(stage).parent])
        return found is None or batches_done(found) >= total_batches(stage_recipe(stage))

    return [stage for stage in SHARES if stage not in RESULTS or not done(stage)]


def total_batches(recipe: dict[str, Any]) -> int:
    """Return the number of training steps after which a recipe ends."""
    trainer, steps = recipe["trainer"], recipe["data"]["init_args"]["steps_per_epoch"]
    return trainer["max_steps"] if trainer.get("max_steps", -1) > 0 else trainer["max_epochs"] * steps


def batches_done(checkpoint: Path) -> int:
    """Return the number of batches that a checkpoint was trained on. (Lightning's step number counts the steps of both
    optimizers of a vocoder.)"""
    return read_checkpoint(checkpoint)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]


def configuration(stage: str, time: Allowance, start: Path | None) -> Recipe:
    """Return a stage's recipe, adapted to the time and the machine. start: the model that joint training begins from;
    None: the results of the earlier stages."""
    recipe = stage_recipe(stage)
    total = total_batches(recipe)
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    written = data["steps_per_epoch"]
    steps = epoch_steps(time.left, 1.0, written)
    if last(stage).is_file():  # a resumed training must keep its steps per epoch, because schedules count epochs
        chosen = RUNS / stage / "schedule.yaml"
        steps = read_recipe(chosen)["data"]["init_args"]["steps_per_epoch"] if chosen.is_file() else written
    data["steps_per_epoch"] = steps
    trainer["check_val_every_n_epoch"] = max(1, trainer["check_val_every_n_epoch"] * written // steps)
    trainer["log_every_n_steps"] = min(trainer["log_every_n_steps"], steps)
    callbacks = {entry["class_path"].rpartition(".")[2]: entry for entry in trainer["callbacks"]}
    # Only a checkpoint from an epoch's end can be resumed exactly.
    callbacks["ModelCheckpoint"]["init_args"] |= {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    deadline: dict[str, Any] = {}
    if stage in RESULTS:
        deadline["epochs"] = trainer["max_epochs"] = -(-total // steps)
        if model.get("adversarial_from") is not None:
            model["adversarial_from"] = model["adversarial_from"] * written // steps
    else:
        trainer |= {"max_steps": -1, "max_epochs": 1_000_000}
    if stage == "joint":
        deadline["decay"] = True
        model["decay_from"] = None
        before = JOINT / "before.safetensors"
        if start is not None:
            files = [start / "encoder.safetensors", start / "model.safetensors"]
            callbacks["InitialWeights"]["init_args"] = {"files": [str(file) for file in files]}
            # a lower rate, because the recipe's rate would spoil weights that are already trained
            model["lr"] = model["lr"] / 3
        elif before.is_file():
            callbacks["InitialWeights"]["init_args"] = {"files": [str(before), str(NETWORK)]}
    set_deadline(recipe, stage, time.end, **deadline)
    fit_machine(recipe)
    return recipe


def begin_joint(start: Path | None) -> None:
    """Prepare joint training.

    start: the model to begin from. An unfinished joint training stays and will be resumed; the checkpoints of a
        finished one are deleted. None: begin from the earlier stages. The weights of an earlier joint training are
        saved, because the new training takes its acoustic model from them; then its checkpoints are deleted.
    """
    finished, checkpoints = JOINT / "finished", JOINT / "checkpoints"
    if last("joint").is_file() and (start is None or finished.is_file()):
        if start is None:
            save_network(load_module(newest(checkpoints, 1))[0].network, JOINT / "before.safetensors")
        shutil.rmtree(checkpoints)
    finished.unlink(missing_ok=True)


def export(before: float | None, data: dict[str, Any], stages: list[str]) -> Outcome:
    """Score the trained model and write it to runs/. Returns the outcome, with scores in percent.

    before: the earlier model's phone error rate, from 0 to 1; None: no earlier model.
    data: arguments of `SpeechTranslationData`. stages: names of the stages that were trained.
    """
    checkpoint = newest(JOINT / "checkpoints", 1)
    after = phone_errors(checkpoint[0], data)
    better = before is None or after < before
    folder = assemble(checkpoint, vocoder_folder(), *PAIRS, CORPUS / "lexicon.tsv", run_folder(MODEL, better))
    trained = f"{', '.join(stages)}; {read_checkpoint(checkpoint[0])['global_step']} joint steps"
    before = None if before is None else 100 * before
    return write_outcome(Outcome(NAME, trained, "phone errors, %", before, 100 * after, better, folder))


def vocoder_folder() -> Path:
    """Return a folder with a trained vocoder: that of the vocoder stage. If there is none, the start model's vocoder is
    copied to runs/ with the same file names. Raises InputError if the start model has none."""
    own = RUNS / "vocoder"
    if (own / RESULTS["vocoder"]).is_file():
        return own
    shipped = start_model(MODEL)
    if not (shipped / "vocoder.safetensors").is_file():
        raise InputError(f"`{own}` must hold a vocoder, but does not. Train with --fresh.")
    folder = RUNS / "shipped"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shipped / "vocoder.safetensors", folder)
    described = json.loads((shipped / "config.json").read_text(encoding="utf-8"))["vocoder"]
    (folder / "vocoder.json").write_text(json.dumps({"config": described}), encoding="utf-8")
    return folder


def set_aside() -> None:
    """Move the output folders of all stages into a new folder in runs/. Nothing is deleted."""
    folders = [folder for stage in SHARES if (folder := RUNS / stage).exists()]
    if not folders:
        return
    aside = numbered(RUNS / "before")
    aside.mkdir()
    for folder in folders:
        folder.rename(aside / folder.name)
    print(f"earlier runs are set aside in {aside}")


def missing() -> str:
    """Build the corpus if it is missing, or continue an interrupted build. Returns "", because DASpeech is never
    skipped.

    Raises InputError if espeak-ng or flite is needed but not installed, and MmdecError if the build fails.
    """
    # if this file exists, the corpus is complete, because the script that builds it writes this file last
    finished = CORPUS / "lexicon.tsv"
    if finished.is_file():
        return ""
    lacking = [program for program in ("espeak-ng", "flite") if shutil.which(program) is None]
    if lacking:
        raise InputError(
            f"`{CORPUS}` must be finished, or {' and '.join(lacking)} installed to build it, but neither is so: "
            f"'{finished}' does not exist. Install Debian's packages espeak-ng and flite, or copy a whole corpus there."
        )
    print("building the corpus first, or the rest of it; this is done once and not counted", flush=True)
    code = run_builder(BUILDER, CORPUS)
    if not finished.is_file():
        raise MmdecError(f"`{BUILDER} --out {CORPUS}` failed with {code}. See above; run again to go on.")
    if code:
        print("The recordings named above failed; training goes on without them.", flush=True)
    return ""
