"""The table of collectives: waiting apart from moving, beside what the link gives."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.late import line
from unisono.report import collectives, page
from unisono.report.collect import RankFacts, RunRecord

MIB = 1 << 20


def facts(rank: int, late: float, steps: int = 20) -> RankFacts:
    """Two calls a step: a large one, for which rank 1 is late and which moves 16 MiB in 10 ms, and a small one."""
    said = []
    for step in range(1, steps + 1):
        calls: list[list[Any]] = [
            ["dp", "all_reduce", 16 * MIB, "backward", "stem", late, 0.11, late, 0],
            ["dp", "all_gather", 24, "optim", "", 0.12, 0.1202, 0.12, 0],
        ]
        said.append(line(step, rank, {"forward": 0.05, "backward": 0.05}, 0.1 - late, calls))
    return RankFacts(rank, "a", {"dp": rank}, tuple(said))


def run_of(folder: Path, **more: Any) -> RunRecord:
    return replace(RunRecord(folder, ranks=(facts(0, 0.02), facts(1, 0.1))), **more)


def test_waiting_and_moving(tmp_path: Path) -> None:
    large, small = collectives.table(run_of(tmp_path))
    assert (large.axis, large.op, large.size, large.a_step) == ("dp", "all_reduce", 16 * MIB, 1.0)
    assert large.waiting_s == pytest.approx(0.04), "80 ms of one rank of two"
    assert large.moving_s == pytest.approx(0.01) and large.rate == pytest.approx(16 * MIB / 0.01)
    assert large.share == pytest.approx(1.0) and large.of == "best call"
    assert small.share is None and small.size == 0 and small.moving_s == pytest.approx(0.0002)


def test_beside_a_measured_link(tmp_path: Path) -> None:
    prediction = {"calibrated": True, "links": [[1, 9e9], [2, 4 * 16 * MIB / 0.01]]}
    large = collectives.table(run_of(tmp_path, prediction=prediction))[0]
    assert large.of == "calibrated" and large.share == pytest.approx(0.25)
    assert (
        collectives.table(run_of(tmp_path, prediction={**prediction, "calibrated": False}))[0].of
        == "best call"
    )


def test_the_page_and_its_json(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    said = json.loads(json.dumps(collectives.as_json(run)))
    assert [row["op"] for row in said["collectives"]] == ["all_reduce", "all_gather"]
    assert [(one["rank"], one["phase"]) for one in said["stragglers"]] == [(1, "")]
    text = collectives.section(run)
    assert "rank 1 is late" in text and "16.0 MiB to 256 MiB" in text.replace("16 MiB", "16.0 MiB")
    assert text in page.page(run, page.analyse.analyse(run))


def test_a_run_of_before_has_no_table(tmp_path: Path) -> None:
    run = RunRecord(tmp_path, ranks=(RankFacts(0, steps=({"step": 1, "time": {}},)),))
    assert collectives.table(run) == [] and collectives.section(run) == ""
