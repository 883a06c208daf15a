"""Tests `make train` with a simulated clock: how it divides its minutes and keeps to them; and its final table."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.training import timed_run
from mmdec.training.make_train import SYSTEMS, Wish, advice, affordable, main
from mmdec.training.timed_run import Allowance, Outcome
from mmdec.types import InputError, MmdecError


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)


class Clock:
    """Moves when something is done."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.given: dict[str, float] = {}

    def __call__(self) -> float:
        return self.now

    def system(
        self, name: str, share: float, least: float = 60.0, missing: str = "", build: float = 0.0, part: float = 1.0
    ) -> Wish:
        """One that takes a part of the time that it gets, and as long to build its corpus as it is told."""

        def built() -> str:
            self.now += build
            return missing

        def train(time: Allowance, runner: object, fresh: bool) -> Outcome:
            self.given[name] = round(time.left, 6)
            self.now += part * time.left
            return Outcome(name, "12 steps", "errors, %", 2.0, 1.5, True, Path("runs") / name)

        return Wish(name, share, least, built, train)


def test_minutes_are_shared_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """What one leaves goes to the others; building corpora does not count; what was loaded before does."""
    clock = Clock()
    systems = [clock.system("a", 0.5, build=500.0, part=0.8), clock.system("b", 0.3), clock.system("c", 0.2)]
    outcomes = main(20, systems=systems, now=clock, begun=clock.now - 30)
    assert clock.given == {"a": pytest.approx(585), "b": pytest.approx(421.2), "c": pytest.approx(280.8)}
    assert clock.now == pytest.approx(5000 + 500 + 1200 - 30)
    assert [one.system for one in outcomes] == ["a", "b", "c"]
    said = capsys.readouterr().out
    assert "trained in 20:00 minutes" in said
    for line in ("2.000", "1.500", "errors, %", "better", "python -m mmdec promote runs/a"):
        assert line in said


def test_the_phrasebook_translator_stays_in_runs() -> None:
    assert "--model runs/daspeech-phrasebook" in advice(Path("runs/daspeech-phrasebook"))
    assert advice(Path("runs/vlm-scenes")).endswith("mmdec promote runs/vlm-scenes")


@pytest.mark.parametrize("minutes", [0.5, 1, 2, 3, 4, 6, 25])
def test_whatever_the_minutes_they_are_kept(minutes: float) -> None:
    clock = Clock()
    systems = [clock.system(one.name, one.share, one.least) for one in SYSTEMS]
    main(minutes, systems=systems, now=clock)
    assert clock.now - 5000 == pytest.approx(60 * minutes)
    assert next(iter(clock.given)) == SYSTEMS[0].name
    for system in SYSTEMS[1:]:
        assert clock.given.get(system.name, system.least) >= system.least - 1e-3


def test_who_gets_too_little_leaves_it_to_those_before() -> None:
    wishes = [("a", 0.5, 60.0), ("b", 0.3, 60.0), ("c", 0.2, 60.0)]
    assert affordable(wishes, 400) == ["a", "b", "c"]
    assert affordable(wishes, 200) == ["a", "b"]
    assert affordable(wishes, 20) == ["a"]


def test_what_cannot_be_trained_is_named_and_takes_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    main(10, systems=[clock.system("a", 0.5), clock.system("b", 0.5, missing="no corpus")], now=clock)
    assert clock.given == {"a": 600}
    assert "no corpus" in capsys.readouterr().out


def test_there_is_one_at_a_time() -> None:
    clock = Clock()

    def second(time: Allowance, runner: object, fresh: bool) -> Outcome:
        with pytest.raises(InputError, match=r"alone in 'runs', but make train \(process \d+\) works there"):
            main(5, systems=[clock.system("b", 1.0)], now=clock)
        return Outcome("a", "tried")

    main(5, systems=[Wish("a", 1.0, 1.0, lambda: "", second)], now=clock)
    assert not clock.given
    main(5, systems=[clock.system("b", 1.0)], now=clock)  # the file of the lock is still there; the lock is not
    assert clock.given


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_minutes_must_be_positive(minutes: float):
    with pytest.raises(InputError, match="`minutes` must be positive"):
        main(minutes)


def test_outside_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path / "recipes")
    with pytest.raises(InputError, match="`make train` needs a checkout"):
        main(1)


def test_a_stage_that_fails_stops_everything():
    with pytest.raises(MmdecError, match=r"`python -m mmdec.no_such_module fit` failed with 1"):
        timed_run.run("mmdec.no_such_module", "fit")
