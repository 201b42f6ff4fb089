"""`plan` and `simulate` without `--cluster`: this machine where it was measured, else a built-in one, and which is said."""

import json
import os
from pathlib import Path

import pytest

from tests.planner.cores import MACHINE
from tests.verbs.test_auto import calibrated
from unisono.cli import main
from unisono.measure.calibrate import MeasuredMachine, as_toml, link_between
from unisono.plan import Plan

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> tuple[str, str]:
        assert main(list(words)) == 0
        out = capsys.readouterr()
        return out.out, out.err

    return run


@pytest.fixture
def nobody_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", calibrated(tmp_path)["XDG_CACHE_HOME"])


def test_ranks_beyond_the_cores_of_a_measured_machine_have_a_price(here: None, said) -> None:
    page, _ = said("simulate", "--demo", "--plan", f"dp={2 * MACHINE.count}", "--train.micro_batch", "1")
    head = page.splitlines()[1]
    assert f"{2 * MACHINE.count} ranks on {MACHINE.count} cores, as unisono calibrate measured them" in head
    assert "another's cores" not in page and "the host has to load" in page


@pytest.mark.parametrize("state", ["here", "nobody_measured"])
def test_plans_have_as_many_ranks_as_cores_unless_others_are_asked_for(
    state: str, request: pytest.FixtureRequest, said
) -> None:
    request.getfixturevalue(state)

    def worlds(*words: str) -> set[int]:
        told = json.loads(said("plan", "--demo", *words, "--json")[0])
        return {Plan.parse(row["plan"]).world for row in told["plans"]}

    assert worlds() == {CORES}
    assert worlds("--launch.ranks", "4") == worlds("--plan", "dp=4") == {4}


def test_plans_of_a_measured_machine_with_gpus_have_a_rank_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said
) -> None:
    """However many cores it has; the figures are those that an H200 gave."""
    gpus = 2 * CORES + 1
    link = link_between(gpus, [(1 << 12, 20e-6), (1 << 28, 1.6e-3)])
    machine = MeasuredMachine(
        "H200", gpus, {"fp32": 52e12, "bf16": 776e12}, memory=150e9, bandwidth=3.9e12, units=132, link=link
    )
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "cluster.toml").write_text(as_toml(machine, "a test"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = json.loads(said("plan", "--demo", "--train.global_batch", f"{4 * gpus}", "--json")[0])
    assert {Plan.parse(row["plan"]).world for row in told["plans"]} == {gpus}


def test_figures_of_another_machine_are_told_as_such(nobody_measured: None, said) -> None:
    for verb in ("plan", "simulate"):
        assert "nobody has measured this machine" in said(verb, "--demo")[1]
        assert "nobody" not in said(verb, "--demo", "--cluster", "laptop")[1]


def test_a_front_that_is_shown_in_part_says_so(said) -> None:
    asked = ["plan", "--model.n_layer", "24", "--model.d_model", "2048", "--model.n_head", "16", "--model.vocab", "51200",
             "--train.global_batch", "512", "--cluster", "dgx-a100:2"]  # fmt: skip
    fronts = [
        (len(json.loads(said(*words, "--json")[0])["pareto"]), said(*words)[0])
        for words in (asked, [*asked, "--plan", "dp=16"])
    ]
    assert max(count for count, _ in fronts) > 8 > min(count for count, _ in fronts)
    assert all((f"(8 of {count}, which --json has)" in page) == (count > 8) for count, page in fronts)


def test_a_small_model_is_better_off_on_one_device_and_computes_nothing_twice(
    nobody_measured: None, said
) -> None:
    page, _ = said("plan", "--model.kind", "mlp", "--data.source", "digits", "--cluster", "laptop")
    assert "one device alone would be quicker" in page
    first = next(line for line in page.splitlines() if line.startswith("1. "))
    assert "recompute" not in first
    assert "bf16" not in page  # nobody has measured that it is quicker on a CPU
    many, _ = said("plan", "--model.n_layer", "24", "--model.d_model", "2048", "--model.n_head", "16",
                   "--model.vocab", "51200", "--train.global_batch", "512", "--cluster", "dgx-a100",
                   "--plan", "precision=bf16", "--top", "1")  # fmt: skip
    assert "one device alone" not in many
