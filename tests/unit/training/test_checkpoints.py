"""Tests checkpoints: the error for a damaged one names the newest good one, and files are written completely."""

from __future__ import annotations

import os
import pickle
import random
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmdec.errors import InputError, MmdecError
from mmdec.training.checkpoints import (
    WholeCheckpoints,
    check_local,
    last_checkpoint,
    load_averaged,
    newest_checkpoints,
    read_checkpoint,
    read_resumed,
)


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch sprung",)


def checkpoint(step: int = 3, fill: float = 1.0) -> dict[str, Any]:
    state = {"weight": torch.full((64, 64), fill), "bias": torch.zeros(64)}
    return {"state_dict": state, "global_step": step, "hyper_parameters": {"lr": 0.5}}


def save(content: Any, path: Path) -> None:
    torch.save(content, path)


def test_units_are_stored_apart_from_hyper_parameters(tmp_path: Path) -> None:
    content = {**checkpoint(), "hyper_parameters": {"lr": 0.5, "units": ["a", "b"]}}
    WholeCheckpoints().save_checkpoint(content, tmp_path / "last.ckpt")
    assert content["hyper_parameters"] == {"lr": 0.5, "units": ["a", "b"]}  # the run's own
    written = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert (written["hyper_parameters"], written["units"]) == ({"lr": 0.5}, ["a", "b"])
    assert read_checkpoint(tmp_path / "last.ckpt")["hyper_parameters"] == content["hyper_parameters"]


def cut(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])

    return damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (cut(0.0), "cut off or another file, 0 bytes"),
    "a byte": (cut(0.0001), "cut off or another file, 1 bytes"),
    "a third": (cut(0.33), "cut off or another file"),
    "nearly all": (cut(0.999), "cut off or another file"),
    "a bit": (flip, "its record '.*data/0' is damaged"),
    "random": (lambda path: path.write_bytes(random.Random(0).randbytes(5000)) and None, "another file"),
    "text": (lambda path: path.write_text("lr: 3") and None, "another file"),
    "code": (
        lambda path: save({"state_dict": {"weight": Trap()}}, path),
        "asks for posix.system, which would run",
    ),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Trap())) and None, "another file"),
    "list": (lambda path: save([1], path), "it holds a list"),
    "no weights": (lambda path: save({"global_step": 3}, path), "it has no state_dict"),
    "a number": (lambda path: save({"state_dict": {"weight": 3}}, path), "'weight' in its state_dict is not a tensor"),
    "not finite": (lambda path: save(checkpoint(fill=float("nan")), path), "finite weights, but 'weight' in"),
    "directory": (replace(Path.mkdir), "is a folder"),
    "loop": (replace(lambda path: path.symlink_to(path)), "symbolic links"),
    "gone": (replace(lambda path: path.symlink_to("nowhere")), "does not exist"),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's checkpoints: two good ones, a newer one that is cut off, and the last."""
    monkeypatch.chdir(tmp_path)
    for step in (9, 10, 11):
        save(checkpoint(step), tmp_path / f"step={step}.ckpt")
    cut(0.5)(tmp_path / "step=11.ckpt")
    save(checkpoint(12), tmp_path / "last.ckpt")
    return tmp_path


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_one_sentence_with_the_newest_good_one(kind: str, run: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(run / "last.ckpt")
    with pytest.raises(InputError, match=rf"last\.ckpt'.*{message}|{message}.*last\.ckpt'") as caught:
        read_resumed(run / "last.ckpt")
    text = str(caught.value)
    assert text.startswith("`ckpt_path` must ")
    assert text.endswith(f"The newest good one there is '{run / 'step=10.ckpt'}': --ckpt_path=last takes it.")
    assert "\n" not in text
    assert len(text) < 500
    assert last_checkpoint([run]) == run / "step=10.ckpt"
    assert not (run / "sprung").exists()


def test_a_good_last_checkpoint_is_taken(run: Path) -> None:
    assert last_checkpoint([run / "none", run]) == run / "last.ckpt"
    assert read_resumed(run / "last.ckpt")["global_step"] == 12
    (run / "last.ckpt").unlink()
    assert last_checkpoint([run]) == run / "step=10.ckpt"
    (run / "step=7-v1.ckpt").touch()
    assert newest_checkpoints(run, 2) == [run / "step=10.ckpt", run / "step=11.ckpt"]


def test_no_good_checkpoint_is_an_error(run: Path) -> None:
    for path in run.glob("*.ckpt"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="No other one there is good"):
        last_checkpoint([run])
    assert last_checkpoint([run / "none"]) is None


@pytest.mark.parametrize("address", ["http://a/b", "HTTPS://a", "s3://b/x", "file:///x", "registry:x", "ab::c"])
def test_addresses_are_refused_as_checkpoints(address: str, run: Path) -> None:
    for call in (read_resumed, lambda path: WholeCheckpoints().save_checkpoint(checkpoint(), path)):
        with pytest.raises(InputError, match=r"must be a path of this machine, but is '.*Download it first"):
            call(address)
    assert check_local("C:/x", "ckpt_path") == Path("C:/x")
    assert check_local("./s3:x", "ckpt_path") == Path("s3:x")


@contextmanager
def nearly_full(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1000, 17000])
def test_a_full_disk_leaves_the_earlier_checkpoint(size: int, run: Path) -> None:
    before, names = (run / "last.ckpt").read_bytes(), sorted(run.iterdir())
    with nearly_full(size), pytest.raises(MmdecError, match=r"last\.ckpt' cannot be written \(File too large\)"):
        WholeCheckpoints().save_checkpoint(checkpoint(fill=2.0), run / "last.ckpt")
    assert (run / "last.ckpt").read_bytes() == before
    assert sorted(run.iterdir()) == names


def test_weights_that_are_not_finite_are_not_saved(run: Path) -> None:
    with pytest.raises(MmdecError, match=r"after step 3, 1 of 2 weights .*'weight' first\. Lower .*lr`, which is 0\.5"):
        WholeCheckpoints().save_checkpoint(checkpoint(fill=float("inf")), run / "new" / "step=3.ckpt")
    assert not (run / "new").exists()


class Square(nn.Linear):
    """A training module: `size` is its hyperparameter."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)


def test_checkpoints_of_different_modules_are_not_averaged(tmp_path: Path) -> None:
    places = [tmp_path / f"step={step}.ckpt" for step in (1, 2)]
    for step, path in enumerate(places, 1):
        state = {"weight": torch.full((3, 3), float(step)), "bias": torch.zeros(3)}
        save({"state_dict": state, "global_step": step, "hyper_parameters": {"size": 3, "_note": 1}}, path)
    module, step = load_averaged(Square, places)
    assert step == 2
    assert torch.equal(module.weight, torch.full((3, 3), 1.5))
    for named, result in ((places[0], "(4, 4) and not (3, 3)"), (places[1], "absent and not (3, 3)")):
        state = {"weight": torch.zeros(4, 4), "bias": torch.zeros(3)} if "(4" in result else {"bias": torch.zeros(3)}
        before = named.read_bytes()
        save({"state_dict": state, "global_step": 1, "hyper_parameters": {"size": 3}}, named)
        with pytest.raises(InputError, match=re.escape(f"'weight' in '{named}' is {result}")):
            load_averaged(Square, places)
        named.write_bytes(before)
    save({"state_dict": state, "global_step": 1, "hyper_parameters": {"length": 3}}, places[1])
    with pytest.raises(InputError, match=r"this kind of training, but '.*step=2.ckpt' is not \(TypeError: "):
        load_averaged(Square, places)


def test_checkpoints_have_the_mode_of_the_umask(run: Path) -> None:
    before = os.umask(0o027)
    try:
        WholeCheckpoints().save_checkpoint(checkpoint(), run / "new" / "step=3.ckpt")
    finally:
        os.umask(before)
    assert (run / "new" / "step=3.ckpt").stat().st_mode & 0o777 == 0o640
    WholeCheckpoints().remove_checkpoint(run / "new" / "step=3.ckpt")
    WholeCheckpoints().remove_checkpoint(run / "new" / "step=3.ckpt")
    assert not list((run / "new").iterdir())
