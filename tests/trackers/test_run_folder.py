"""What trackers are shown of a run folder."""

import json
from pathlib import Path

from unisono.observe.metrics import JsonLines
from unisono_contrib.trackers.run_folder import StepReader, tracked


def test_numbers_have_names_and_times_that_depend_on_the_folder_alone(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "history.jsonl") as lines:
        lines.write({"at": 1000.0, "event": "start", "step": 0}, {"at": 2000.0, "event": "start", "step": 2})
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        for step in (1, 2, 3):
            lines.write({"step": step, "loss": 1.5, "grad_norm": float("nan"), "tokens": 100, "tokens_per_s": 50.0,
                         "time": {"forward": 0.25}, "ledger": {"dp/x": 7}, "skipped": "it was bad", "acc@1": 0.5})  # fmt: skip
    reader = StepReader(tmp_path, 0)
    reader.read()
    assert [(point.step, point.at) for point in reader.points] == [(1, 1002.0), (2, 1004.0), (3, 2002.0)]
    assert reader.points[0].values == {
        "loss": 1.5, "tokens": 100.0, "tokens_per_s": 50.0, "time/forward": 0.25, "acc_1": 0.5,
    }  # fmt: skip


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "loss": 2.0}) + "\n"
    reader = StepReader(tmp_path, 0)
    reader.read()
    (tmp_path / "metrics.jsonl").write_text(line[:7])
    reader.read()
    assert reader.last == 0
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line[7:])
    reader.read()
    assert reader.last == 1


def test_a_run_of_long_ago_counted_from_0(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.0}\n')
    reader = StepReader(tmp_path, 0)
    reader.read()
    assert [point.step for point in reader.points] == [1, 2]


def test_a_run_is_known_by_its_folder_and_its_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "demo" / "2026"
    (folder / "checkpoints" / "step-000020").mkdir(parents=True)
    (folder / "checkpoints" / "step-000020" / "manifest.json").write_text("{}")
    (folder / "config.resolved.toml").write_text(
        'name = "demo"\nplan = "dp=2"\n[train]\nlr = 0.1\nsteps = 20\n'
    )
    (folder / "history.jsonl").write_text('{"at": 7.0, "event": "start", "step": 0, "data": "ab"}\n')
    run = tracked(folder, 20)
    assert (run.key, run.began, run.state, run.saved) == ("demo-2026", 7.0, "lost", "checkpoints/step-000020")
    assert run.recipe == {"name": "demo", "train.lr": 0.1, "train.steps": 20}
    assert run.tags == {"run": "demo/2026", "plan": "dp=2", "data": "ab"}
    assert tracked(folder, 20, generation=2).key == "demo-2026-2"
