"""What methods decide, as properties: nothing twice, whatever order trials end in and wherever a sweep is killed."""

import math
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.sweep.fake import LR, FakePlace, Killed, bowl, searched, spec_in
from unisono.spec.errors import UsageError
from unisono_contrib.sweep import journal
from unisono_contrib.sweep.methods import METHODS
from unisono_contrib.sweep.methods.asha import SuccessiveHalving
from unisono_contrib.sweep.methods.batch import largest_useful
from unisono_contrib.sweep.methods.lr_range import judge_range
from unisono_contrib.sweep.progress import State, SweepProgress
from unisono_contrib.sweep.result import trained
from unisono_contrib.train.rates.range import RangeTest


def steps_of(folder: Path) -> int:
    return trained(journal.lines(folder))[-1][0]


def pieces(place: FakePlace) -> Counter[tuple[int, int]]:
    return Counter((job.number, job.until) for job in place.started)


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    space = (
        '"train.lr" = {low = 0.01, high = 1.0, log = true, points = 3}\n"train.optimizer" = ["adamw", "sgd"]'
    )
    progress = searched(spec_in(tmp_path, 'method = "grid"', space), tmp_path / "out", FakePlace(bowl))
    seen = [(round(t.params["train.lr"], 9), t.params["train.optimizer"]) for t in progress.trials]
    assert seen == [(lr, name) for lr in (0.01, 0.1, 1.0) for name in ("adamw", "sgd")]
    assert progress.best is not None and progress.best.params["train.lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("workers", [1, 3])
def test_random_trials_are_the_same_for_any_workers(tmp_path: Path, workers: int) -> None:
    place = FakePlace(bowl, seed=workers)
    progress = searched(spec_in(tmp_path, "trials = 9"), tmp_path / "out", place, workers)
    assert [t.state for t in progress.trials] == [State.DONE] * 9 and place.together == workers
    assert progress.trials[4].params["train.lr"] == pytest.approx(
        searched(spec_in(tmp_path, "trials = 5"), tmp_path / "two", FakePlace(bowl))
        .trials[4]
        .params["train.lr"]
    )
    assert all(1e-4 <= t.params["train.lr"] <= 1.0 for t in progress.trials)


@pytest.mark.parametrize(
    ("method", "workers"), [("random", 2), ("asha", 2), ("asha", 3), ("pbt", 2), ("tpe", 2), ("grid", 1)]
)
def test_killed_anywhere_it_repeats_nothing_that_has_ended(tmp_path: Path, method: str, workers: int) -> None:
    """Killed after every third piece: each piece that ended is started once, and each kill costs what was under way."""
    if method == "tpe":
        pytest.importorskip("optuna")
    space = LR if method != "grid" else '"train.lr" = {low = 0.01, high = 1.0, points = 8}'
    spec, kills = spec_in(tmp_path, f'method = "{method}"\ntrials = 8', space), 0
    jobs = []
    while True:
        place = FakePlace(bowl, seed=kills, most=3)
        try:
            progress = searched(spec, tmp_path / "out", place, workers)
            break
        except Killed:
            kills += 1
        finally:
            jobs += place.started
    values = [line for line in journal.lines(tmp_path / "out") if line["event"] == "value"]
    ended = Counter((line["trial"], line["step"]) for line in values)
    assert max(ended.values()) == 1 and kills >= 2
    assert len(values) <= len(jobs) <= len(values) + kills * workers
    assert len(progress.trials) == 8 and all(t.state in (State.DONE, State.PRUNED) for t in progress.trials)


@pytest.mark.parametrize("seed", range(6))
def test_asha_trains_few_to_the_end_and_finds_what_random_finds(tmp_path: Path, seed: int) -> None:
    spec = spec_in(tmp_path, 'method = "asha"\ntrials = 16\neta = 4')
    progress = searched(spec, tmp_path / "out", FakePlace(bowl, seed=seed))
    plain = searched(spec_in(tmp_path, "trials = 16"), tmp_path / "plain", FakePlace(bowl))
    assert progress.best is not None and plain.best is not None
    assert progress.best.number == plain.best.number and progress.best.step == 64
    assert 2 * steps_of(tmp_path / "out") <= steps_of(tmp_path / "plain") == 16 * 64


@pytest.mark.parametrize("seed", range(4))
def test_asha_goes_on_with_the_best_of_each_rung_alone(tmp_path: Path, seed: int) -> None:
    """Whoever goes on is among the best 1/eta of its rung at that moment; at the very end one alone may be less."""
    spec = spec_in(tmp_path, 'method = "asha"\ntrials = 13\neta = 3\nmin_steps = 4', steps=36)
    assert isinstance(spec.method, SuccessiveHalving) and spec.method.rungs(36) == (4, 12, 36)
    searched(spec, tmp_path / "out", FakePlace(bowl, seed=seed), workers=3)
    progress, at_all = spec.progress, 0
    for line in journal.lines(tmp_path / "out"):
        if line["event"] == "start" and line["until"] > 4:
            trial, rung = progress.trials[line["trial"]], line["until"] // 3
            there = sorted(t.at(rung) or 0.0 for t in progress.trials if t.reached(rung))
            is_last = not progress.is_running and len(progress.trials) == 13
            at_all += is_last
            assert trial.value in there[: max(is_last, len(there) // 3)]
        progress = progress.after(line)
    assert [t.step for t in progress.trials].count(36) >= 1


def test_asha_keeps_its_rungs_over_a_kill_and_a_failure(tmp_path: Path) -> None:
    """A trial without a number never goes on, and the rest is judged by all that was there before the kill."""
    spec = spec_in(tmp_path, 'method = "asha"\ntrials = 8\neta = 2\nmin_steps = 16')
    odd: FakePlace = FakePlace(
        lambda recipe, step: None if recipe["name"] == "trial-002" else bowl(recipe, step)
    )
    odd.most = 6
    with pytest.raises(Killed):
        searched(spec, tmp_path / "out", odd)
    odd.most = 10**6
    progress = searched(spec, tmp_path / "out", odd)
    assert progress.trials[2].step == 16 and progress.trials[2].state is State.PRUNED
    assert progress.best is not None and progress.best.state is State.DONE and progress.best.step == 64


def test_a_population_is_the_same_on_any_number_of_workers_and_copies_its_best(tmp_path: Path) -> None:
    said = 'method = "pbt"\ntrials = 6\ninterval = 16'
    one, two = (
        searched(spec_in(tmp_path, said), tmp_path / f"out{workers}", FakePlace(bowl, seed=workers), workers)
        for workers in (1, 4)
    )
    assert [(t.params, t.values, t.source) for t in one.trials] == [
        (t.params, t.values, t.source) for t in two.trials
    ]
    copied = [line for line in journal.lines(tmp_path / "out1") if line.get("source")]
    assert copied and all(t.step == 64 and t.state is State.DONE for t in one.trials)
    first = [t for line in copied[:1] for t in one.trials if t.number == line["source"][0]]
    assert copied[0]["params"]["train.lr"] != first[0].params["train.lr"]
    parents = [*(tmp_path / "out1").glob("trial-*/*/parent.json")]
    assert parents and all((path.parent / "checkpoints").is_dir() for path in parents)


def test_tpe_learns_from_trials_that_have_ended(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = f'{LR}\n"train.optimizer" = ["adamw", "sgd"]'
    spec = spec_in(tmp_path, 'method = "tpe"\ntrials = 24\nstartup = 8', space)
    progress = searched(spec, tmp_path / "out", FakePlace(bowl), workers=1)
    far = [abs(math.log10(t.params["train.lr"]) + 2) for t in progress.trials]
    assert sum(far[16:]) < 0.7 * sum(far[:8]), "later trials are nearer to the best than random ones"
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(tmp_path / "out" / "optuna.journal")))
    study = optuna.load_study(study_name="sweep", storage=storage)
    assert len(study.trials) == 24 and sum(t.state.is_finished() for t in study.trials) >= 23


def test_without_optuna_there_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match="needs optuna") as caught:
        spec_in(tmp_path, 'method = "tpe"')
    assert caught.value.code == "E01" and "pip install" in caught.value.fix


def test_methods_say_what_they_do() -> None:
    assert all(METHODS.find(name).summary() for name in METHODS.names())
    assert SweepProgress({}, 10, 1).best is None


def losses(falls_from: float, least: float, diverges: float, count: int = 400) -> list[tuple[float, float]]:
    """Of a range test from 1e-6 to 10: flat, falling to `least`, rising, and gone at `diverges`."""
    points = []
    for i in range(count):
        lr = 1e-6 * 1e7 ** (i / (count - 1))
        fallen = min(1.0, max(0.0, math.log(lr / falls_from) / math.log(least / falls_from)))
        loss = 2.3 - 1.5 * (3 * fallen**2 - 2 * fallen**3) + 0.2 * max(0.0, math.log10(lr / least)) ** 2
        points.append((lr, loss if lr < diverges else 1e3 * lr / diverges))
    return points


def test_a_range_test_finds_where_the_loss_falls_is_least_and_has_diverged() -> None:
    test = judge_range(losses(1e-4, 1e-2, 1.0))
    assert test is not None and test.diverged is not None
    assert 3e-4 < test.steepest < 5e-3 and 7e-3 < test.least < 4e-2 and 0.99 < test.diverged < 2.0
    calm = judge_range(losses(1e-4, 1e-2, math.inf))
    assert calm is not None and calm.diverged is None and calm.least == test.least
    gone = judge_range([*losses(1e-4, 1e-2, math.inf)[:300], (0.5, math.inf)])
    assert gone is not None and gone.diverged == 0.5
    assert judge_range([(1e-3, math.nan)] * 5) is None and judge_range([]) is None


def test_the_rate_of_a_range_test_grows_by_one_factor() -> None:
    rate = RangeTest(first_lr=1e-6)
    rates = [rate.at(step, 101, 1.0) for step in range(101)]
    assert rates[0] == pytest.approx(1e-6) and rates[-1] == pytest.approx(1.0)
    assert {round(b / a, 9) for a, b in pairwise(rates)} == {round(1e6 ** (1 / 100), 9)}


@pytest.mark.parametrize(
    ("steps", "useful"),
    [([100, 50, 25, 12], 128), ([100, 55, 50, 49], 32), ([100, 99, 20, 10], 16), ([100, 60, 40, 27], 64)],
)
def test_the_largest_useful_batch_is_the_last_whose_doubling_paid(steps: list[int], useful: int) -> None:
    assert largest_useful([*zip((16, 32, 64, 128), steps, strict=True)], 1.5) == useful


def test_batches_are_searched_with_rates_that_grow_with_them(tmp_path: Path) -> None:
    space = '"train.global_batch" = [32, 8, 16]'
    spec = spec_in(tmp_path, 'method = "batch"\nscale = "linear"', space)
    progress = searched(spec, tmp_path / "out", FakePlace(bowl))
    rates = [(t.params["train.global_batch"], t.params["train.lr"] / 1e-3) for t in progress.trials]
    assert rates == [(8, 1.0), (16, 2.0), (32, 4.0)]
    assert spec.method.conclude(progress).params is None, "these runs have written no steps"
    assert spec.method.misfit(spec_in(tmp_path, "").progress) != ""


def test_a_range_test_is_one_run(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, 'method = "lr_range"', '"train.lr" = {low = 1e-6, high = 10.0}')
    progress = searched(spec, tmp_path / "out", FakePlace(lambda recipe, step: recipe["train"]["first_lr"]))
    assert [(t.params, t.value) for t in progress.trials] == [({"train.lr": 10.0}, 1e-6)]
    assert "one interval" in spec.method.misfit(spec_in(tmp_path, "", '"train.lr" = [0.1]').progress)
