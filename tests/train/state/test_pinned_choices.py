"""What a run measured at its start is done alike when it goes on."""

import json
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.comm.collectives.memory import live as memory
from unisono.programs.collectives import pick
from unisono.sync import _bucket
from unisono.sync._bucket import tuned
from unisono.train.state.pinned_choices import COLLECTIVE, SYNC, pinned
from unisono_contrib.comm import probe as probing

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ranks_on_threads")]
ASKED = "auto:measured=true"


@pytest.mark.parametrize(
    ("told", "asked", "dp", "taken"),
    [
        ('{"asked": "auto:measured=true", "dp": 4, "taken": "auto:by=ring-9"}', ASKED, 4, "auto:by=ring-9"),
        ('{"asked": "auto:measured=true", "dp": 4, "taken": "auto:by=ring-9"}', ASKED, 2, ASKED),
        ('{"asked": "auto:measured=true", "dp": 4, "taken": "auto:by=ring-9"}', "ring", 4, "ring"),
        ('{"asked": "auto', ASKED, 4, ASKED),
        ("{}", ASKED, 4, ASKED),
        (None, ASKED, 4, ASKED),
    ],
)
def test_it_counts_for_the_same_plan_on_as_many_replicas(tmp_path, told, asked, dp, taken) -> None:
    if told is not None:
        (tmp_path / COLLECTIVE).write_text(told)
    assert pinned(tmp_path, asked, dp, COLLECTIVE) == taken


def test_a_run_that_goes_on_measures_nothing_anew(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(memory, "sees_all", lambda pg: False)  # as on several hosts
    monkeypatch.setattr(probing, "probe", lambda pg: pick.read("ring-65536"))
    text, runs = tmp_path / "text.txt", tmp_path / "runs"
    text.write_text("to be or not to be, that is the question. " * 60)
    sizes = "--model.n_layer 2 --model.n_head 2 --model.d_model 16 --model.context 8 --train.global_batch 8"
    words = ["train", *sizes.split(), "--plan", f"dp=2 collective={ASKED}", "--data.source", f"text:{text}",
             "--no-out.report", "--out.dir", str(runs)]  # fmt: skip
    assert main([*words, "--train.steps", "2"]) == 0
    assert "ring to 64 KiB" in capsys.readouterr().err
    [folder] = [path.parent for path in runs.rglob(COLLECTIVE)]
    assert json.loads((folder / COLLECTIVE).read_text())["taken"] == "auto:by=ring-65536"
    monkeypatch.setattr(probing, "probe", lambda pg: pytest.fail("it was measured anew"))
    assert main(["train", "--resume", str(folder), "--train.steps", "4", "--no-out.report"]) == 0
    assert "by=ring-65536" in capsys.readouterr().err


def test_buckets_are_as_large_as_they_were(tmp_path: Path, monkeypatch) -> None:
    """Other borders would round sums otherwise."""
    monkeypatch.setattr(memory, "sees_all", lambda pg: False)
    monkeypatch.setattr(_bucket, "measured_link", lambda *_: (1.0, 1e8))
    text, runs = tmp_path / "text.txt", tmp_path / "runs"
    text.write_text("to be or not to be, that is the question. " * 60)
    sizes = "--model.n_layer 2 --model.n_head 2 --model.d_model 16 --model.context 8 --train.global_batch 8"
    words = ["train", *sizes.split(), "--plan", "dp=2 sync=every_step:bucket=auto", "--data.source", f"text:{text}",
             "--no-out.report", "--out.dir", str(runs)]  # fmt: skip
    assert main([*words, "--train.steps", "2"]) == 0
    [folder] = [path.parent for path in runs.rglob(SYNC)]
    taken = json.loads((folder / SYNC).read_text())["taken"]
    assert pinned(folder, "every_step:bucket=auto", 2, SYNC) == taken != "every_step:bucket=auto"
    monkeypatch.setattr(_bucket, "measured_link", lambda *_: pytest.fail("it was measured anew"))
    assert main(["train", "--resume", str(folder), "--train.steps", "4", "--no-out.report"]) == 0


@pytest.mark.parametrize(
    ("before", "rate", "mib"), [(1e-3, 1e8, 3.24), (0.0, 1e8, 1.0), (1.0, 1e9, 25.0), (1e-9, 1e8, 1.0)]
)
def test_buckets_are_tuned_to_latency_and_rate(before: float, rate: float, mib: float) -> None:
    assert tuned(116_000_000, before, rate) / 2**20 == pytest.approx(mib, abs=0.01)
