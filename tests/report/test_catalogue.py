"""Runs below a folder: what each was made of, which came from which, and which of them are meant."""

import json
import os
from pathlib import Path

import pytest

from tests.report.runs import write_run
from unisono.observe.files import lock_now
from unisono.spec.errors import UsageError
from unisono.verbs.train.folder import _note_code
from unisono_contrib.report.catalogue import RunFilter, bound, entries, entry, parents

OLD = Path(__file__).parents[1] / "fixtures"


def run_in(folder: Path, *events: str, parent: Path | None = None, **made: int) -> Path:
    """A run of some steps; events: lines of its history."""
    run = write_run(folder, steps=20, **made)
    lines = [{"at": 100.0 + at, "event": event, "data": "cafe0123"} for at, event in enumerate(events)]
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "env.json").write_text(json.dumps({"git": {"commit": "0a1b2c3d4e", "changed": True}}))
    if parent is not None:
        (run / "parent.json").write_text(json.dumps({"run": str(parent), "checkpoint": "step-000010"}))
    return run


def test_a_run_tells_what_it_was_made_of(tmp_path: Path) -> None:
    first = run_in(tmp_path / "a" / "1", "start", "end")
    second = run_in(tmp_path / "b" / "2", "start", parent=first, dp=4)
    one, two = entries(tmp_path)
    assert (one.folder, two.folder) == (first, second)
    assert (one.state, two.state) == ("done", "lost") and (one.step, one.steps) == (20, 20)
    assert (
        one.plan.startswith("dp=2") and one.data == "cafe0123" and one.commit == "0a1b2c3d4e" and one.changed
    )
    assert one.parent is None and two.parent == (str(first), "step-000010")
    assert one.nbytes > 1000 and one.metrics["loss"] > 0 and [*parents([one, two])] == ["1"]
    assert json.loads(json.dumps(two.as_json()))["parent"] == {"run": str(first), "checkpoint": "step-000010"}


def test_states(tmp_path: Path) -> None:
    run = run_in(tmp_path / "1", "start", "end")
    for code, state in ((1, "failed"), (137, "failed"), (75, "stopped"), (130, "stopped")):
        (run / "error.json").write_text(json.dumps({"exit": code}))
        assert entry(run).state == state
    folder = os.open(run, os.O_RDONLY)
    assert lock_now(folder) and entry(run).state == "running"
    os.close(folder)
    assert entry(run).state == "stopped"


def test_the_commit_is_that_of_the_newest_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = run_in(tmp_path / "1", "start", "end"), {"commit": "ffff0000", "changed": False}
    for git, commit in ((None, "0a1b2c3d4e"), (now, "ffff0000")):
        monkeypatch.setattr("unisono.observe.environment.git_commit", lambda git=git: git)
        _note_code(run)
        assert entry(run).commit == commit
    assert entry(run).state == "done" and not entry(run).changed


def test_weights_of_another_run_make_it_the_parent(tmp_path: Path) -> None:
    first, second = run_in(tmp_path / "1", "start"), run_in(tmp_path / "2", "start")
    config = second / "config.resolved.toml"
    (first / "checkpoints" / "step-000003").mkdir(parents=True)
    config.write_text(
        config.read_text().replace("n_head", f'weights = "{first}/checkpoints/step-000003"\nn_head')
    )
    parent = entry(second).parent
    assert parent is not None and Path(parent[0]).resolve() == first.resolve() and parent[1] == "step-000003"
    assert entry(first).parent is None


def test_the_newest_run_of_a_name_is_the_parent_of_what_came_after(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "mine" / f"2026010{day}", "start") for day in (1, 2, 3)]
    for run in runs:
        (run / "checkpoints" / "step-000003").mkdir(parents=True)
        (run / "checkpoints" / "step-000003" / "manifest.json").touch()
    config = runs[1] / "config.resolved.toml"
    config.write_text(config.read_text().replace("n_head", f'weights = "{tmp_path}/mine"\nn_head'))
    parent = entry(runs[1]).parent
    assert parent is not None and Path(parent[0]).resolve() == runs[0].resolve()


def test_a_run_of_an_old_version_and_a_damaged_one_are_listed(tmp_path: Path) -> None:
    old = entries(OLD)
    assert old and all(run.step > 0 and run.plan for run in old)
    (tmp_path / "config.resolved.toml").write_text("no = = toml")
    (tmp_path / "history.jsonl").write_text("{\n[]\n")
    (tmp_path / "summary.json").write_text("[1]")
    (run,) = entries(tmp_path)
    assert (run.plan, run.step, run.parent, run.data) == ("", 0, None, "")
    with pytest.raises(UsageError, match="no such folder"):
        entries(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("wanted", "which"),
    [
        (RunFilter(), "12"), (RunFilter(plan="dp=4"), "2"), (RunFilter(plan="pp=1 dp=2"), "1"),
        (RunFilter(plan="dp=3"), ""), (RunFilter(states=("done", "failed")), "1"), (RunFilter(parent="x/1"), "2"),
        (RunFilter(commit="0a1b"), "12"), (RunFilter(commit="b"), ""), (RunFilter(data="cafe"), "12"),
        (RunFilter(name="std*"), "12"), (RunFilter(name="std"), ""),
        (RunFilter(bounds=(("loss", ">", 0.0), ("loss", "<", 1e9))), "12"), (RunFilter(bounds=(("loss", "<", 0.0),)), ""),
        (RunFilter(bounds=(("nothing", ">", 0.0),)), ""),
    ],
)  # fmt: skip
def test_a_filter_means_runs_that_have_all_that_it_says(
    tmp_path: Path, wanted: RunFilter, which: str
) -> None:
    first = run_in(tmp_path / "1", "start", "end")
    run_in(tmp_path / "2", "start", parent=first, dp=4)
    assert "".join(run.folder.name for run in entries(tmp_path) if wanted(run)) == which


def test_bounds() -> None:
    assert bound("val_loss<1.5") == ("val_loss", "<", 1.5) and bound("a >= -1e3") == ("a", ">=", -1000.0)
    for text in ("loss", "loss<", "loss=1", "loss<1e", "<1"):
        with pytest.raises(UsageError, match="compares no metric"):
            bound(text)
