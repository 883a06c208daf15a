"""Tests the recipes of Medusa heads on a tiny Whisper and corpus: runs that are killed and resumed, both kinds of
labels, and that the logged tokens per round are those of decoding."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mmdec import speculate
from mmdec.drafters.medusa.checkpoint import load_heads
from mmdec.drafters.medusa.training.data import HeadData
from mmdec.drafters.medusa.training.module import MedusaModule
from mmdec.drafters.networks.training.simulation import measure, spread
from mmdec.training.__main__ import main
from mmdec.training.checkpoints import read_checkpoint
from tests.recipes.kill_callback import ends_killed, training_to_be_killed
from tests.recipes.small_recipes import logged_at_each_step
from tests.support.lightning_warnings import LIGHTNING
from tests.support.tiny_english import write_english
from tests.support.tiny_whisper import write

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "medusa"
pytestmark = [
    pytest.mark.slow,
    *LIGHTNING,
    pytest.mark.usefixtures("workplace"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_english(tmp_path_factory.mktemp("english"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "base", with_heads=False, seconds=30, max_target_positions=96)


# as in the recipe of any Whisper, but for the states on disk
TINY = (
    "--model.init_args.kind=linear",
    "--model.init_args.vocabulary=0",
    "--trainer.num_sanity_val_steps=-1",
    "--data.init_args.language=en",
)


def options(name: str, base: Path, corpus: Path, *more: str) -> list[str]:
    """Return a recipe as written, but small and in one process."""
    place = "runs/tiny" if name == "whisper-tiny.en" else "runs/medusa-librispeech"
    return [
        "fit",
        *(f"--config={RECIPES / recipe}.yaml" for recipe in ("../base", name)),
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.strategy=auto",
        "--trainer.log_every_n_steps=1",
        "--trainer.check_val_every_n_epoch=1",
        f"--trainer.default_root_dir={place}",
        f"--data.init_args.cache_dir={place}/cache",
        "--model.init_args.start=null",
        "--model.init_args.heads=3",
        "--model.init_args.max_tokens=12",
        f"--data.init_args.base={base}",
        f"--data.init_args.corpus={corpus}",
        "--data.init_args.batch_size=2",
        "--data.init_args.steps_per_epoch=2",
        "--data.init_args.dev_batches=1",
        "--data.init_args.train_split=train",
        "--data.init_args.dev_split=dev",
        *(TINY if name == "whisper-tiny.en" else ("--data.init_args.workers=0",)),
        *more,
    ]


def test_a_killed_run_resumes_identically(base: Path, corpus: Path, workplace: Path, monkeypatch: Any):
    unbroken, broken = workplace / "unbroken", workplace / "broken"
    unbroken.mkdir()
    broken.mkdir()
    common = ("--trainer.max_epochs=4", "--data.init_args.repeat_after=2")
    log = broken / "log.txt"
    child = training_to_be_killed(options("whisper-tiny.en", base, corpus, *common), 5, broken, log)
    monkeypatch.chdir(unbroken)
    main(options("whisper-tiny.en", base, corpus, *common))
    ends_killed(child, log)
    assert Path("../broken/runs/tiny/checkpoints/last.ckpt").is_file(), log.read_text()
    monkeypatch.chdir(broken)
    torch.rand(11)
    main(options("whisper-tiny.en", base, corpus, *common, "--ckpt_path=last"))
    expected, result = logged_at_each_step(unbroken / "runs/tiny/log"), logged_at_each_step(broken / "runs/tiny/log")
    assert {step for step, name in expected if name == "train/head3"} == set(range(8))
    assert {name for _, name in expected} >= {"dev/chain", "dev/tree", "dev/head1", "dev/head3_top5", "dev/loss"}
    assert result == expected
    one, other = (read_checkpoint(place / "runs/tiny/checkpoints/last.ckpt") for place in (unbroken, broken))
    assert one["best"] == other["best"] > 1
    states = [sorted((place / "runs/tiny/cache").glob("states-*/0.f16")) for place in (unbroken, broken)]
    assert states[0][0].read_bytes() == states[1][0].read_bytes()
    assert all(name.startswith("heads.") for name in one["state_dict"])  # the base is not in it
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    for file in ("config.json", "heads.safetensors"):
        assert (unbroken / "runs/tiny/heads" / file).read_bytes() == (broken / "runs/tiny/heads" / file).read_bytes()
    assert (
        json.loads((broken / "runs/tiny/heads/provenance.json").read_text())["training"]["dev"]["tree"] == one["best"]
    )


class Stopped(Exception):
    """`generate` has decoded its first window; with timestamps it would look for more in what is left."""


class Door:
    """Decodes with heads, keeps what comes, and leaves."""

    def __init__(self, drafter: Any, nodes: int) -> None:
        self.rounds: list[Any] = []
        self.entry_point = speculate(drafter, num_speculative_tokens=nodes, on_round=self.rounds.append)

    def __call__(self, model: Any, input_ids: Any, **options: Any) -> Any:
        self.sequences = self.entry_point(model, input_ids, **options)[:, input_ids.shape[1] :].tolist()
        raise Stopped


@pytest.mark.parametrize("kind", ["linear", "block"])
def test_decoding_accepts_what_the_log_reports(base: Path, corpus: Path, kind: str):
    """Heads that know a batch's texts by heart: its labels are `generate`'s text, and a chain of as many nodes as there
    are heads takes as many rounds as validation says."""
    composition = '{"timestamps": 0.5, "previous": 0.0, "empty": 0.0}'
    cli = main(
        options(
            "whisper-tiny.en",
            base,
            corpus,
            f"--model.init_args.kind={kind}",
            f"--model.init_args.keep_states={kind == 'linear'}".lower(),
            f"--data.init_args.composition={composition}",
            "--data.init_args.batch_size=5",
            "--data.init_args.steps_per_epoch=1",
            "--trainer.max_epochs=1",
            "--trainer.num_sanity_val_steps=0",
        )
    )
    module, data = cli.model, cli.datamodule
    assert isinstance(module, MedusaModule)
    assert isinstance(data, HeadData)
    data.stored = ()
    batch = next(iter(data.val_dataloader()))
    assert batch.features is not None
    assert set(batch.timed) == {False, True}
    places = module.text_positions(batch)
    optimizer = torch.optim.Adam(module.heads.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        module.weighted_loss(module.losses(places)[0]).backward()
        optimizer.step()
    with torch.no_grad():
        module.validation_step(batch, 0)
    chain, tree, module.probabilities = measure(module.ranks, 3, 6)
    right = spread(module.ranks, 0, (1,))
    assert right[0] > 0.9
    assert 2.5 < chain <= tree + 1e-9
    module.save_drafter({"chain": chain, "tree": tree})
    model = data.model()
    tokens = rounds = 0
    for timed in (False, True):
        rows = [row for row, flag in enumerate(batch.timed) if flag == timed]
        entry_point = Door(load_heads("runs/tiny/heads", model), 3)
        with pytest.raises(Stopped):
            model.generate(batch.features[rows], language="en", return_timestamps=timed, custom_generate=entry_point)
        for row, text in zip(rows, entry_point.sequences, strict=True):
            assert module.labels.tokens[batch.names[row]] == text[:12]
        # Only what validation has seen is counted: a round that begins among a text's first 12 tokens.
        written = [len(new) for new in entry_point.rounds[0].tokens]
        for round_ in entry_point.rounds[1:]:
            for row, new in zip(round_.rows, round_.tokens, strict=True):
                gained = min(len(new), 12 - written[row])
                written[row] += gained
                tokens, rounds = tokens + gained, rounds + (gained > 0)
    assert tokens / rounds == pytest.approx(chain)


def test_labels_are_the_models_own_or_the_truth(base: Path, corpus: Path):
    ends = {}
    for labels in ("own", "truth"):
        more = (f"--model.init_args.labels={labels}", "--trainer.max_epochs=1")
        heard = () if labels == "truth" else ("--data.init_args.language=null",)  # the model's own choice
        cli = main(options("librispeech", base, corpus, *more, *heard))
        module, data = cli.model, cli.datamodule
        assert isinstance(module, MedusaModule)
        assert isinstance(data, HeadData)
        batch = next(iter(data.val_dataloader()))
        places = module.text_positions(batch)
        ends[labels] = [row.tolist() for row in places.targets.split(places.lengths)]
        if labels == "truth":
            for text, row in zip(batch.truth, ends[labels], strict=True):
                assert row[0] == [*text, -1, -1][1:4]
                assert row[-1] == [text[-1], -1, -1]
        else:
            for name, row in zip(batch.names, ends[labels], strict=True):
                text = module.labels.tokens[name]
                assert row == [[*text, -1, -1, -1][place : place + 3] for place in range(1, len(text))]
    assert ends["own"] != ends["truth"]
    label_files = list(Path("runs/medusa-librispeech/cache").glob("labels-*-bfloat16-12/0.jsonl"))
    assert len(label_files) == 1


def test_training_continues_from_saved_heads(base: Path, corpus: Path):
    main(options("whisper-tiny.en", base, corpus, "--trainer.max_epochs=1"))
    Path("runs/tiny/heads").rename("first")
    more = ("--model.init_args.start=first", "--model.init_args.lr=0", "--model.init_args.heads=4")
    cli = main(options("whisper-tiny.en", base, corpus, "--trainer.max_epochs=1", *more))
    assert isinstance(cli.model, MedusaModule)
    old, new = load_heads("first", cli.model.base).heads, cli.model.heads
    for old_head, new_head in zip(old.heads, new.heads, strict=False):
        assert torch.equal(old_head.linear.weight, new_head.linear.weight)
    assert not new.heads[3].linear.weight.any()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (("--model.init_args.start=nowhere",), "heads.safetensors"),
        (("--data.init_args.corpus=nowhere",), "`root` must hold"),
        (("--data.init_args.train_split=train-other",), "`root` must hold a folder 'train-other'"),
        (("--data.init_args.language=xx",), "`language` must be one of the model's, de, en"),
        (("--data.init_args.base=data",), "`model` must be"),
        (("--data.init_args.longest=31",), "`longest` must be"),
    ],
)
def test_mismatched_settings_are_named(base: Path, corpus: Path, more: tuple[str, ...], match: str):
    with pytest.raises(ValueError, match=match):  # InputError is one; jsonargparse wraps those of arguments
        main(options("whisper-tiny.en", base, corpus, "--trainer.fast_dev_run=true", *more))


@pytest.mark.parametrize("name", ["whisper-tiny.en", "librispeech"])
def test_recipes_parse(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(f"--config={RECIPES / recipe}.yaml" for recipe in ("../base", name)), "--print_config"])
    assert stop.value.code == 0
    parsed = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    for part in ("model", "data"):
        for key, value in written[part]["init_args"].items():
            if key != "composition":
                assert parsed[part]["init_args"][key] == value, key


def test_no_more_workers_than_processors(base: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of more."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    data: Any = HeadData(str(base), str(corpus), train_split="train", dev_split="dev", workers=4)
    data.trainer = SimpleNamespace(global_rank=0, world_size=1)
    data.setup("fit")
    assert data.val_dataloader().num_workers == 1
