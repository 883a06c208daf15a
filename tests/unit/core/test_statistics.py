"""Tests the statistics that runs learn: their keys and their copies."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import pkgutil
import sys
import threading
import types
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import mmdec
import mmdec.core
import mmdec.drafters
from mmdec.core import statistics
from mmdec.core.budget import Budget, RoundCosts
from mmdec.core.statistics import DecodingStatistics, MeasurementKey
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.medusa.network import MedusaConfig, MedusaHeads
from mmdec.drafters.recycling import RecyclingDrafter
from mmdec.targets.text import TextTarget
from mmdec.types import Plan, Prior
from tests.support.measurements import measurements
from tests.support.tiny_text import llama
from tests.support.tiny_whisper import VOCABULARY, sound, whisper
from tests.support.warm_processes import python_output

PAIR = MeasurementKey("target", "cpu", "drafter")
ENDING = MeasurementKey("model", "cpu", "one that ends chains")
PRIOR = Prior(((0.8, 0.1), (0.7, 0.2), (0.6, 0.2)))


@pytest.fixture(autouse=True)
def no_starved_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no round wait for a processor. On a busy machine rounds do, and those teach no seconds."""
    monkeypatch.setattr("mmdec.core.timing.STARVED_CPU_FRACTION", 0.0)


def pairs(learned: DecodingStatistics) -> list[MeasurementKey]:
    """List (target, device, drafter), the least recently used first."""
    return list(learned._pairs)


def rounds(budget: Budget, count: int, seed: int = 0, batch: int = 1) -> list[Plan]:
    """Record rounds of a drafter that is right seven times in ten, on a noisy clock."""
    rng, plans = Random(seed), []
    for _ in range(count):
        plan = budget.plan(batch)
        plans.append(plan)
        accepted = [next((n for n in range(plan.depth) if rng.random() > 0.7), plan.depth) for _ in range(batch)]
        seconds = (1 + 0.02 * plan.nodes) * (1 + rng.random())
        budget.observe(RoundCosts(batch, [1 + plan.nodes] * batch, plan.depth, accepted, seconds, 0.01 * plan.depth))
    return plans


def warm() -> DecodingStatistics:
    learned = DecodingStatistics()
    for batch in (1, 5):
        rounds(Budget(learned, PAIR, PRIOR.chain), 60, batch, batch)
    accuracy, rng = learned.accuracy(PAIR, PRIOR), Random(1)
    for _ in range(100):
        accuracy.learn(rng.randrange(3), rng.choice([0, 1, None]))
    rounds(Budget(learned, MeasurementKey("another", "cuda:0", "drafter")), 20)
    rounds(Budget(learned, ENDING, may_stop_early=True), 40)
    return learned


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copied_statistics_plan_as_those_that_were_copied(copied: Callable[[Any], Any]) -> None:
    learned = warm()
    other = copied(learned)
    assert measurements(other) == measurements(learned)
    assert rounds(Budget(copied(learned), PAIR), 1)[0].nodes > 0
    assert rounds(Budget(DecodingStatistics(), PAIR), 1)[0].nodes == 0  # a cold one begins with a plain pass
    for pair in (PAIR, MeasurementKey("another", "cuda:0", "drafter"), ENDING):
        for batch in (1, 2, 5, 8):
            plans = rounds(Budget(learned, pair, may_stop_early=pair is ENDING), 40, 7, batch)
            assert rounds(Budget(other, pair, may_stop_early=pair is ENDING), 40, 7, batch) == plans
            assert any(plan.threshold for plan in plans) == (pair is ENDING)
    assert other.accuracy(PAIR, PRIOR).probabilities() == learned.accuracy(PAIR, PRIOR).probabilities()
    assert other.accuracy(PAIR, PRIOR).tree(5, 3) == learned.accuracy(PAIR, PRIOR).tree(5, 3)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copied_statistics_learn_independently(copied: Callable[[Any], Any]) -> None:
    learned = warm()
    before = measurements(learned)
    other = copied(learned)
    rounds(Budget(other, PAIR, PRIOR.chain), 20)
    other.accuracy(PAIR, PRIOR).learn(0, 0)
    other.pair(MeasurementKey("new", "cpu", "drafter"))
    assert measurements(learned) == before
    assert other.pair(PAIR).target is other._targets["target", "cpu"]  # a target's drafters share its seconds


def test_heads_of_another_shape_start_without_history() -> None:
    learned = warm()
    assert learned.accuracy(PAIR, PRIOR) is learned.accuracy(PAIR, PRIOR)
    assert learned.accuracy(PAIR, Prior(((0.5,),))).depth == 1


def test_old_pairs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MAX_STORED_PAIRS", 3)
    learned = DecodingStatistics()
    first = learned.pair(MeasurementKey("a", "cpu", "x"))
    for index in range(5):
        learned.pair(MeasurementKey(str(index), "cpu", "x"))
        assert learned.pair(MeasurementKey("a", "cpu", "x")) is first  # in use
    assert pairs(learned) == [
        MeasurementKey("3", "cpu", "x"),
        MeasurementKey("4", "cpu", "x"),
        MeasurementKey("a", "cpu", "x"),
    ]
    assert {target for target, _ in learned._targets} == {"3", "4", "a"}


def test_models_are_identified_by_their_weights() -> None:
    model, same = llama(), llama()
    name = TextTarget(model).name
    assert TextTarget(same).name == name
    assert len({name, TextTarget(llama(1)).name, TextTarget(llama(hidden=32)).name}) == 3
    model.config._name_or_path = same.config._name_or_path = "hub/tiny"
    assert TextTarget(model).name.startswith("tiny-")
    other = llama(1)
    other.config._name_or_path = "hub/tiny"
    assert TextTarget(other).name != TextTarget(model).name == TextTarget(same).name
    assert TextTarget(same.to(torch.bfloat16)).name != TextTarget(model).name  # the same object in another precision


def test_drafters_are_identified_by_weights_and_description() -> None:
    def medusa(seed: int, ranks: Any = None) -> str:
        torch.manual_seed(seed)
        heads = MedusaHeads(MedusaConfig(32, VOCABULARY, "linear", 3))
        for weight in heads.parameters():
            torch.nn.init.normal_(weight)
        return MedusaDrafter(heads, torch.nn.Linear(32, VOCABULARY), ranks).name

    names = [medusa(0), medusa(1), medusa(0, PRIOR.ranks), medusa(0, [[0.5, 0.1]] * 3)]
    assert len(set(names)) == 4
    assert medusa(0) == names[0]
    ids = torch.zeros(40, 8, dtype=torch.long)
    assert len({RecyclingDrafter().name, RecyclingDrafter(ids).name, RecyclingDrafter(ids + 1).name}) == 3


def test_a_name_is_the_same_in_another_process() -> None:
    code = (
        "from mmdec.targets.text import TextTarget; from tests.support.tiny_text import llama; "
        "print(TextTarget(llama()).name)"
    )
    assert python_output(code).split()[-1] == TextTarget(llama()).name


def test_the_name_of_a_deleted_model_is_not_reused() -> None:
    gc.collect()
    gc.freeze()  # what other tests keep need not be looked through twenty times
    names, models = set(), list[weakref.ref[LlamaForCausalLM]]()
    try:
        for seed in range(20):
            model = llama(seed)  # often at the address of the one before
            names.add(TextTarget(model).name)
            models.append(weakref.ref(model))
            del model
            gc.collect()
    finally:
        gc.unfreeze()
    assert len(names) == 20
    assert all(model() is None for model in models)  # nothing that keeps names keeps a model


def run(model: LlamaForCausalLM, learned: DecodingStatistics | None, **options: Any) -> list[Any]:
    ids = torch.tensor([[3, 4, 5, 6] * 3])
    made = mmdec.generate(model, ids, statistics=learned, max_new_tokens=20, do_sample=False, **options)
    return [round_.tokens for round_ in made.rounds]


def test_two_models_of_one_class_learn_independently() -> None:
    """The first one's times say nothing about the second."""
    learned = DecodingStatistics()
    first, second = llama(), llama(1)
    run(first, learned)
    run(first, learned)
    assert learned.pair(MeasurementKey(TextTarget(first).name, "cpu", "lookup-1-3")).costs(0)[0].timed > 10
    assert learned.pair(MeasurementKey(TextTarget(second).name, "cpu", "lookup-1-3")).costs(0)[0].timed == 0


def test_every_public_call_learns_in_the_given_statistics() -> None:
    default, learned = mmdec.default_statistics(), DecodingStatistics()
    default.clear()
    model, network = llama(), whisper()
    ids = torch.tensor([[3, 4, 5, 6] * 3])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    key = MeasurementKey(TextTarget(model).name, "cpu", "lookup-1-3")

    def timed() -> int:
        return learned.pair(key).costs(0)[0].timed

    seen = [timed()]
    mmdec.generate(model, ids, statistics=learned, **options)
    seen.append(timed())
    list(mmdec.stream(model, ids, statistics=learned, **options))
    seen.append(timed())
    model.generate(ids, custom_generate=mmdec.speculate("lookup", statistics=learned), **options)
    seen.append(timed())
    assert seen == sorted(set(seen))
    heads = MedusaDrafter(MedusaHeads(MedusaConfig(32, VOCABULARY, "linear", 3)), network.proj_out)
    prior = heads.needs.prior
    assert prior is not None
    plug = mmdec.speculate(heads, num_speculative_tokens=4, statistics=learned)
    network.generate(**sound(1), language="en", custom_generate=plug)
    (pair,) = [pair for pair in pairs(learned) if pair.drafter == heads.name]
    probabilities = [list(row) for row in prior.ranks]
    assert learned.accuracy(pair, prior).probabilities() != [pytest.approx(row) for row in probabilities]
    assert pairs(default) == []
    mmdec.generate(model, ids, **options)
    assert pairs(default) == [key]


def state() -> dict[str, str]:
    """Return all that modules and classes of the core and the drafters hold and might change; drafters' caches of pure
    functions are no such thing."""
    result = {}
    for package in (mmdec.core, mmdec.drafters):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            module = importlib.import_module(info.name)
            owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
            for owner in owners:
                if owner is not module and not owner.__module__.startswith("mmdec."):
                    continue
                for name, value in vars(owner).items():
                    plain = isinstance(value, (type, types.FunctionType, types.ModuleType, property))
                    if not plain and not name.startswith("__"):
                        result[f"{owner.__name__}.{name}"] = (
                            repr(vars(value)) if hasattr(value, "__dict__") else repr(value)
                        )
    return result


def test_nothing_is_learned_in_modules_or_classes() -> None:
    network = whisper()
    drafter = MedusaDrafter(MedusaHeads(MedusaConfig(32, VOCABULARY, "block", 3, 2, 48)), network.proj_out)
    before, held = state(), repr([(name, value) for name, value in vars(drafter).items() if name != "heads"])
    assert "mmdec.core.budget.CHAIN_PLANS" in before
    for proposing in (drafter, "lookup", "recycling"):
        plug = mmdec.speculate(proposing, statistics=DecodingStatistics())
        network.generate(**sound(2), language="en", custom_generate=plug)
    run(llama(), DecodingStatistics(), drafter=llama(1))
    assert state() == before
    assert repr([(name, value) for name, value in vars(drafter).items() if name != "heads"]) == held


def test_threads_share_statistics_while_they_are_copied() -> None:
    learned, errors, copies = DecodingStatistics(), list[BaseException](), list[DecodingStatistics]()

    def learn(seed: int) -> None:
        try:
            for batch in (1, 2, 4):
                rounds(Budget(learned, PAIR), 50, seed, batch)
                accuracy = learned.accuracy(PAIR, PRIOR)
                for _ in range(50):
                    accuracy.learn(seed % 3, 0)
                    accuracy.tree(5, 3)
                copies.append(copy.deepcopy(learned))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=learn, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert [learned.pair(PAIR).costs(power)[0].timed for power in (0, 1, 2)] == [300, 300, 300]
    assert len(copies) == 18
    assert all(other.pair(PAIR).costs(0)[0].timed >= 50 for other in copies)
