"""Tests the drafter doctor on a trained EAGLE-3: it finds each fault that a test puts in, with the remedy, finds none
in a right network, and counts the same rounds as decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmdec.cli import app
from mmdec.doctor.answers import (
    DoctorPrompt,
    NetworkRun,
    TargetAnswer,
    answer_prompt,
    chain_rounds,
    decoding_rounds,
    load_examined_model,
    make_inputs,
    read_doctor_prompts,
    right_tokens,
)
from mmdec.doctor.conventions import CheckpointFolder
from mmdec.doctor.examine import (
    ScoredPositions,
    Trial,
    accepted_share,
    assess_gain,
    find_remedies,
    matched_gain,
    mean_share,
    student_t_quantile,
)
from mmdec.doctor.searches import fit_head
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.errors import InputError
from mmdec.pretrained.drafters import load_drafter, save_network
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.targets.text import TextTarget
from mmdec.types import Needs
from tests.support import vlm_folders as seeing_folders
from tests.support.grid import WHOLE, sample
from tests.unit.doctor.trained_eagle3 import SIZE, language, loaded, prompt_texts, published_eagle3, target, trained

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
Examined = tuple[list[Trial], list[Trial], NetworkRun]
IDS = "eagle_aux_hidden_state_layer_ids"
COST = 0.02


@pytest.fixture(scope="module")
def texts() -> list[TargetAnswer]:
    """Return the target's answers, all its layers recorded."""
    own = TextTarget(target())
    needs = Needs(layers=(-1, *range(own.layers)), embeds=True)
    asked = [DoctorPrompt(text) for text in prompt_texts(24)]
    made = [answer_prompt(own, make_inputs(loaded(), prompt, False), None, 48, needs) for prompt in asked]
    return [text for text in made if text is not None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_eagle3(trained(0), tmp_path_factory.mktemp("sound") / "eagle3")


def read(folder: Path) -> NetworkRun:
    """Return a folder's network as it is read."""
    drafter, model = load_drafter(folder, target()), target()
    assert isinstance(drafter, NetworkDrafter)
    return NetworkRun(drafter.network, model.get_input_embeddings(), drafter.output)


def examine_folder(folder: Path, texts: list[TargetAnswer]) -> Examined:
    return find_remedies(read(folder), CheckpointFolder.read(folder), target(), texts)


@pytest.fixture(scope="module")
def examine_sound(texts: list[TargetAnswer], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Examined]:
    """Examines the sound network of a seed, once."""
    made = lambda seed: published_eagle3(trained(seed), tmp_path_factory.mktemp("sound") / "eagle3")  # noqa: E731
    return cache(lambda seed: examine_folder(made(seed), texts))


def share(run: NetworkRun, texts: list[TargetAnswer], depth: int = 1) -> float:
    """Return the share of tokens `depth` behind the root that are right."""
    return accepted_share([right_tokens(run, text, depth)[depth - 1].numpy().astype(float) for text in texts]).value


def apply_remedies(folder: Path, findings: list[Trial], copy: Path) -> Path:
    """Return a copy of a folder with what the remedies set in config.json."""
    described = json.loads((folder / "config.json").read_text())
    for row in findings:
        for name, value in row.remedy.config.items():
            *inner, last = name.split(".")
            place = described
            for part in inner:
                place = place[part]
            place[last] = value
    return write_checkpoint(described, load_file(folder / "model.safetensors"), copy)


def write_checkpoint(described: dict[str, Any], state: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(state, folder / "model.safetensors")
    return folder


def write_changed_checkpoint(sound: Path, change: Change, folder: Path) -> Path:
    described, state = json.loads((sound / "config.json").read_text()), load_file(sound / "model.safetensors")
    change(described, state)
    return write_checkpoint(described, {name: value.contiguous() for name, value in state.items()}, folder)


def tokens_as_table(described: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    state["d2t"] += torch.arange(len(state["d2t"]))
    del state["t2d"]


def outputs(described: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Return the ids of an exporter that counts outputs, where readers take boundaries."""
    described[IDS] = [number - 1 for number in described[IDS]]


# what is planted, by the convention that it breaks
FAULTS: dict[str, tuple[str, Change]] = {
    "layer ids one lower": ("layer ids", outputs),
    "layer ids one higher": ("layer ids", lambda d, s: d.update({IDS: [number + 1 for number in d[IDS]]})),
    "residual": ("residual", lambda d, s: d.update(norm_before_residual=True)),
    "state after the norm": ("feature of drafted tokens", lambda d, s: d.update(norm_output=True)),
    "layer ids left out": ("layer ids", lambda d, s: d.pop(IDS)),
    "tokens in d2t": ("d2t", tokens_as_table),
}
LITTLE = {"layer ids left out": 0.01}  # what a fault costs, where it is less than `COST`


# a convention of config.json, one of a later depth, one of the weights; "residual" is among the two faults below
@pytest.mark.slow
@pytest.mark.parametrize("name", sample(FAULTS, ("layer ids one lower", "state after the norm", "tokens in d2t")))
def test_a_planted_fault_is_named_and_its_remedy_repairs_the_folder(
    name: str, sound: Path, texts: list[TargetAnswer], tmp_path: Path
) -> None:
    convention, change = FAULTS[name]
    folder = write_changed_checkpoint(sound, change, tmp_path / "faulty")
    findings, _, run = examine_folder(folder, texts)
    depth = 2 if convention == "feature of drafted tokens" else 1
    best = share(read(sound), texts, depth)
    assert best - share(read(folder), texts, depth) >= LITTLE.get(name, COST)
    assert [row.convention for row in findings] == [convention]
    assert share(run, texts, depth) == pytest.approx(best, abs=1e-6)
    if findings[0].remedy.config:
        again = apply_remedies(folder, findings, tmp_path / "mended")
        assert share(read(again), texts, depth) == pytest.approx(best, abs=1e-6)
    else:
        assert "`d2t`" in str(findings[0].remedy)


BASES = [(10000.0, 500.0), (2000.0, 500.0), (500.0, 2000.0)]  # of training, in config.json


@pytest.mark.skipif(not WHOLE, reason="the test below looks for a base that is harder to find: MMDEC_ALL")
@pytest.mark.parametrize(("trained_with", "config_says"), BASES)
def test_a_wrong_rope_base_is_named(
    trained_with: float, config_says: float, texts: list[TargetAnswer], tmp_path: Path
) -> None:
    """The usual base, the target's, and an arbitrary one."""
    folder = published_eagle3(trained(rope_theta=trained_with), tmp_path / "faulty", rope_theta=config_says)
    cost = share(read(published_eagle3(trained(rope_theta=trained_with), tmp_path / "right")), texts)
    cost -= share(read(folder), texts)
    findings, tried, _ = examine_folder(folder, texts)
    assert cost >= COST
    assert [row.remedy.config for row in findings] == [{"rope_theta": trained_with}]
    assert all(row.assessment != "off" for row in tried)


@pytest.mark.slow
def test_a_rope_base_between_those_of_the_grid_is_found(texts: list[TargetAnswer], tmp_path: Path) -> None:
    network = trained(rope_theta=30000.0)
    best = share(read(published_eagle3(network, tmp_path / "right")), texts)
    folder = published_eagle3(network, tmp_path / "faulty", rope_theta=500.0)
    findings, _, run = examine_folder(folder, texts)
    assert best - share(read(folder), texts) >= COST
    assert [row.convention for row in findings] == ["rope base"]
    assert share(run, texts) == pytest.approx(best, abs=0.005)


def test_a_lost_head_is_named_alone(sound: Path, texts: list[TargetAnswer], tmp_path: Path) -> None:
    """The model's rows replace the drafter's, together with a second fault."""

    def change(described: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        outputs(described, state)
        rows = read(sound).output.weight[state["d2t"] + torch.arange(len(state["d2t"]))]
        state["lm_head.weight"] = rows.clone()

    findings, tried, run = examine_folder(write_changed_checkpoint(sound, change, tmp_path / "faulty"), texts)
    assert [(row.convention, row.now) for row in findings] == [("LM head", "the model's rows")]
    assert "`lm_head.weight`" in str(findings[0].remedy)
    assert findings[0].gain.value > 0.3
    assert tried == []
    assert share(run, texts) == pytest.approx(findings[0].before.value)


def test_a_head_is_not_lost_where_a_fitted_one_is_little_better(sound: Path, texts: list[TargetAnswer]) -> None:
    fits = fit_head(read(sound), texts)
    assert fits is not None
    own, fitted = (accepted_share(hits).value for hits in fits)
    assert fitted < own


def test_an_embedding_that_is_scaled_shows_nothing_where_it_is_normed(
    examine_sound: Callable[[int], Examined],
) -> None:
    _, tried, _ = examine_sound(0)
    assessments = {row.assessment for row in tried if row.convention == "embedding scale"}
    assert assessments == {"no measurable effect"}


@pytest.mark.parametrize("seed", sample(range(5), slice(1)))
def test_a_sound_network_has_no_findings(seed: int, examine_sound: Callable[[int], Examined]) -> None:
    findings, tried, _ = examine_sound(seed)
    assert findings == []
    assert len(tried) > 10


@pytest.mark.slow
def test_remedies_name_the_keys_of_mmdecs_own_folders(texts: list[TargetAnswer], tmp_path: Path) -> None:
    folder = save_network(trained(0), tmp_path / "own")
    described = json.loads((folder / "config.json").read_text())
    described["layers"] = [layer + 1 for layer in described["layers"]]
    (folder / "config.json").write_text(json.dumps(described))
    findings, _, _ = examine_folder(folder, texts)
    assert [row.remedy.config for row in findings] == [{"layers": [1, 2, 4]}]


@pytest.mark.slow
def test_two_faults_are_repaired_one_after_the_other(sound: Path, texts: list[TargetAnswer], tmp_path: Path) -> None:
    def check_both(described: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        outputs(described, state)
        described["norm_before_residual"] = True

    findings, _, run = examine_folder(write_changed_checkpoint(sound, check_both, tmp_path / "faulty"), texts)
    assert {row.convention for row in findings} == {"layer ids", "residual"}
    assert share(run, texts) == pytest.approx(share(read(sound), texts), abs=1e-6)


@pytest.mark.parametrize("length", [1, 3])
def test_rounds_of_chains_are_those_of_decoding(length: int, sound: Path, texts: list[TargetAnswer]) -> None:
    drafter, run, few = load_drafter(sound, target()), read(sound), texts[:6]
    counted = [chain_rounds(right_tokens(run, text, length), length) for text in few]
    assert counted == [len(decoding_rounds(target(), drafter, text, length, length)) for text in few]


def test_a_tree_takes_fewer_rounds_than_a_chain(sound: Path, texts: list[TargetAnswer]) -> None:
    drafter, few = load_drafter(sound, target()), texts[:6]
    single, tree = (
        sum(len(decoding_rounds(target(), drafter, text, *size)) for text in few) for size in ((1, 1), (8, 4))
    )
    assert sum(text.positions for text in few) / 5 <= tree < single


def test_the_command_prints_a_table_and_json(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.doctor.answers.load_examined_model", lambda *_: loaded())
    data = tmp_path / "prompts.txt"
    data.write_text("\n".join(prompt_texts(3)) + "\n")
    call = ["doctor", str(sound), "target", "--data", str(data), "--tokens", "24"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    assert "bonus included" in result.stdout
    assert "tree of 60, 7 deep" in result.stdout
    report = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert report["positions"] == 3 * 23
    assert report["layout"] == "published, flat"
    assert len(report["rounds"]) == 11


ROWS = [
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]},
    {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A"}], "image": "a.png"},
    {"prompt": "Go on"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_chats_and_pictures_are_read(suffix: str, tmp_path: Path) -> None:
    listed = tmp_path / f"list{suffix}"
    listed.write_text("\n".join(map(json.dumps, ROWS)) if suffix == ".jsonl" else json.dumps(ROWS))
    expected = [
        DoctorPrompt("Hi", "Be short."),
        DoctorPrompt("What?", images=(tmp_path / "a.png",)),
        DoctorPrompt("Go on"),
        DoctorPrompt("In parts"),
    ]
    assert read_doctor_prompts(listed, None) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "{}"),
        ("a.jsonl", '{"messages": 3}'),
        ("a.jsonl", '{"prompt": "x", "image": "../x.png"}'),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'),
        ("a.json", "{}"),
        ("a.txt", "\n"),
        ("a.csv", "x"),
    ],
)
def test_a_bad_list_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError):
        read_doctor_prompts(tmp_path / name, None)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    held = [mean_share([draw.random(40) < draw.beta(8, 2) for _ in range(20)]) for _ in range(400)]
    inside = np.mean([result.low <= 0.8 <= result.high for result in held])
    assert 0.92 <= inside <= 0.98


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.706),
        (0.995, 1, 63.657),
        (0.975, 2, 4.303),
        (0.995, 3, 5.841),
        (0.975, 10, 2.228),
        (0.975, 30, 2.042),
        (0.995, 20, 2.845),
        (0.975, 120, 1.980),
    ],
)
def test_student_quantiles_equal_the_published_table(probability: float, freedom: int, value: float) -> None:
    assert student_t_quantile(probability, freedom) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize(("skill", "gains"), [(0.0, False), (0.3, True)])
def test_easier_texts_do_not_count_as_a_better_fit(skill: float, gains: bool) -> None:
    """A drafter is right as often as the target is sure; the other texts are surer, and perhaps fit it better, too."""
    draw = np.random.default_rng(1)
    confidences = [draw.uniform(0.2, 0.9, 100) for _ in range(16)]
    higher_confidences = [draw.uniform(0.4, 1.0, 100) for _ in range(16)]
    before = [ScoredPositions((draw.random(100) < part * 0.6).astype(float), part) for part in confidences]
    after = [
        ScoredPositions((draw.random(100) < part * (0.6 + skill)).astype(float), part) for part in higher_confidences
    ]
    gain, certain = matched_gain(before, after)
    assert (assess_gain(gain.value, certain) == "off") == gains


def test_a_model_of_text_and_pictures_is_loaded_as_a_vlm(tmp_path: Path) -> None:
    """transformers lists Gemma 3's configuration among language models, too."""
    assert isinstance(load_examined_model(seeing_folders.write("Gemma3", tmp_path / "gemma"), "cpu"), LoadedVlm)


def test_the_target_has_learnt_the_language() -> None:
    text = language(8, 48, 4321)
    assert float(target()(input_ids=text, labels=text).loss) < 1.0
    assert target().config.hidden_size == SIZE
