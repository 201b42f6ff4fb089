"""`unisono sweep` as a user starts it: real runs, killed and stopped, on this machine and on Ray."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.sweep.fake import RECIPE_TEXT
from tests.verbs import jobs
from tests.verbs.jobs import started, unisono
from unisono_contrib.sweep import journal

pytestmark = pytest.mark.timeout(300)

NOTES = """\
import os


def note(model):
    with open("seen.txt", "a") as seen:
        seen.write(f"{os.environ['RANK']} {model._run.replica.update.rate(0)}\\n")
    return 0.0
"""


def folder_with(place: Path, said: str, space: str, recipe: str = "") -> Path:
    (place / "base.toml").write_text(recipe or RECIPE_TEXT.format(steps=8) + "[out]\nreport = false\n")
    (place / "lr.toml").write_text(f'[sweep]\nrecipe = "base.toml"\n{said}\n[sweep.space]\n{space}\n')
    return place


def by_event(folder: Path, event: str) -> list[dict[str, object]]:
    return [line for line in journal.lines(folder) if line["event"] == event]


def test_two_workers_search_and_the_best_recipe_is_written_out(tmp_path: Path) -> None:
    place = folder_with(tmp_path, 'method = "grid"\nworkers = 2', '"train.lr" = [0.01, 0.1]')
    done = unisono(place, "sweep", "lr.toml", "--json")
    assert done.code == 0 and done.left == (), done.err
    said = done.object
    assert [row["state"] for row in said["trials"]] == ["done"] * 2 and said["steps"] == 16
    assert all((place / row["run_dir"] / "config.resolved.toml").is_file() for row in said["trials"])
    assert [Path(file).name for file in said["files"]] == ["sweep.html", "sweep.png", "best.toml"]
    again = unisono(place, "sweep", "lr.toml", "--json")
    assert again.object["trials"] == said["trials"] and len(by_event(place / "runs" / "lr", "start")) == 2
    best = unisono(place, "train", "runs/lr/best.toml", "--dry-run", "--json").object["recipe"]
    assert best["train"]["lr"] == said["best"]["params"]["train.lr"] and best["name"] == "base"


@pytest.mark.slow
def test_a_trial_that_diverges_or_is_killed_leaves_the_others_alone(tmp_path: Path) -> None:
    """Launcher of tasks with resources, retries and results together: a failed trial is tried again, others finish."""
    said = 'method = "grid"\nworkers = 2\nretries = 1'
    place = folder_with(tmp_path, said, '"train.lr" = [0.01, 1e30, 0.1]', RECIPE_TEXT.format(steps=4000))
    with started(place, "sweep", "lr.toml", "--json", "--data.cache", str(tmp_path)) as job:
        job.hear("trial-001  step")
        victim = psutil.Process(job.process.pid).children()[0]
        name = next(word for word in victim.cmdline() if word.endswith("recipe.toml"))
        for process in (*victim.children(recursive=True), victim):
            process.kill()
        done = job.done()
    assert done.code == 0 and done.left == (), done.err
    rows = {Path(row["run_dir"]).parent.name: row for row in done.object["trials"]}
    assert rows["trial-001"]["value"] is None or rows["trial-001"]["value"] > done.object["best"]["value"]
    assert rows[Path(name).parent.name]["failures"] == 1 and done.object["failures"] == 1
    assert [row["step"] for row in done.object["trials"]] == [4000] * 3


@pytest.mark.slow
def test_all_ranks_of_a_trial_have_the_same_values(tmp_path: Path) -> None:
    """Said by the ranks themselves: the learning rate of their own optimiser."""
    (tmp_path / "notes.py").write_text(NOTES)
    recipe = RECIPE_TEXT.format(steps=2) + 'lr_schedule = "constant"\nevaluate = "notes.py:note"\n'
    space = '"train.lr" = [0.5, 0.25]\nplan = ["dp=2"]'
    place = folder_with(tmp_path, 'method = "grid"\nworkers = 1', space, recipe)
    done = unisono(place, "sweep", "lr.toml", "--json")
    assert done.code == 0, done.err
    seen = {*(place / "seen.txt").read_text().splitlines()}
    assert seen == {f"{rank} {rate}" for rank in (0, 1) for rate in (0.5, 0.25)}


def killed(place: Path, number: int, after: int) -> None:
    """Send a signal to a sweep at work once `after` pieces have ended, and wait until all that it started is gone."""
    with started(place, "sweep", "lr.toml", "--quiet") as job:
        until = time.monotonic() + jobs.SECONDS
        while len(by_event(place / "runs" / "lr", "value")) < after:
            assert time.monotonic() < until and job.process.returncode is None, "".join(job.lines)
            time.sleep(0.02)
        trains = psutil.Process(job.process.pid).children(recursive=True)
        os.kill(job.process.pid, number)
        assert len(psutil.wait_procs(trains, 60)[1]) == 0, "what trained has saved and ended by itself"
        code = job.process.wait(60)
    assert code == (130 if number == signal.SIGINT else -number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_half_way_it_repeats_no_piece_and_keeps_its_rungs(
    tmp_path: Path, number: signal.Signals
) -> None:
    said = 'method = "asha"\ntrials = 6\nworkers = 2\neta = 2\nmin_steps = 4'
    place = folder_with(
        tmp_path, said, '"train.lr" = {low = 1e-4, high = 1e-1, log = true}', RECIPE_TEXT.format(steps=16)
    )
    killed(place, number, 3)
    before = by_event(place / "runs" / "lr", "value")
    done = unisono(place, "sweep", "lr.toml", "--json")
    assert done.code == 0 and done.left == (), done.err
    values = by_event(place / "runs" / "lr", "value")
    assert values[: len(before)] == before
    assert max(Counter((line["trial"], line["step"]) for line in values).values()) == 1
    assert done.object["best"]["step"] == 16 and len(done.object["trials"]) == 6
    for row in done.object["trials"]:  # one run each, whose steps were made once
        runs = [*(place / "runs" / "lr" / f"trial-{row['trial']:03}").glob("*/metrics.jsonl")]
        steps = [json.loads(line)["step"] for line in runs[0].read_text().splitlines()]
        assert len(runs) == 1 and steps == [*range(1, row["step"] + 1)]


@pytest.mark.slow
def test_on_ray_a_worker_that_is_lost_costs_its_trial_a_try_and_the_others_end(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install unisono[ray]")
    said = 'method = "grid"\nworkers = 2'
    place = folder_with(tmp_path, said, '"train.lr" = [0.01, 0.1, 0.2]', RECIPE_TEXT.format(steps=2000))
    with started(place, "sweep", "lr.toml", "--json", "--on", "ray") as job:
        runs, until = [], time.monotonic() + jobs.SECONDS
        while not runs and time.monotonic() < until:
            runs = [*place.glob("runs/lr/*/*/metrics.jsonl")]
            time.sleep(0.05)
        tasks = [
            p for p in psutil.process_iter(["cmdline"]) if "ray::trial" in " ".join(p.info["cmdline"] or ())
        ]
        ours = [p for p in tasks if Path(p.cwd()) == place]
        ours[0].kill()
        done = job.done()
    assert done.code == 0, done.err
    assert [row["state"] for row in done.object["trials"]] == ["done"] * 3
    assert done.object["failures"] == 1 and done.left == ()
