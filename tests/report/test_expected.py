"""The prediction beside the measurement: the same parts, nothing lost, and no word where there is nothing to say."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import write_run
from unisono.report.analyse import shares
from unisono.report.collect import collect
from unisono.report.expected import Beside, beside, chart, section
from unisono.report.page import run

TOLD: dict[str, Any] = {
    "schema_version": 1, "cluster": "laptop", "stack": "plain", "calibrated": False, "error_pct": 15.0, "step_s": 0.1,
    "parts": {"compute": 0.07, "comm dp": 0.01, "wait": 0.01, "optim": 0.004, "other": 0.006}, "mem_mib": 200.0,
}  # fmt: skip


def run_with(folder: Path, told: object, **shape: int) -> Path:
    write_run(folder, **{"dp": 2, "steps": 12, **shape})
    (folder / "prediction.json").write_text(told if isinstance(told, str) else json.dumps(told))
    return folder


def both_of(folder: Path) -> Beside:
    run = collect(folder)
    both = beside(run, shares(run))
    assert both is not None
    return both


def test_all_parts_stand_beside_each_other_and_add_up(tmp_path: Path) -> None:
    folder = run_with(tmp_path, TOLD)
    both, found = both_of(folder), shares(collect(folder))
    assert [line.part for line in both.lines] == ["compute", "comm dp", "wait", "optim", "other"]
    assert both.predicted == pytest.approx(0.1)
    assert both.measured == pytest.approx(sum(share.wall for share in found) / len(found))
    assert both.mem_measured == pytest.approx(291.5 + 12 + 5)
    ends = [max(bar.stop for bar in chart(both).bars if bar.row == row) for row in (0, 1)]
    assert ends == [pytest.approx(both.predicted), pytest.approx(both.measured)]
    page = section(collect(folder), found)
    assert (
        "Nobody has measured this machine. The built-in cluster laptop" in page
        and "unisono calibrate" in page
    )
    assert "±" not in page, "how right another machine's prices are says nothing of this one"
    page = section(collect(run_with(tmp_path / "own", TOLD | {"calibrated": True})), found)
    assert "± 15 %" in page and "measured on this machine" in page
    calibrated = section(collect(run_with(tmp_path / "b", TOLD | {"calibrated": True})), found)
    assert "unisono calibrate" not in calibrated and "measured on this machine" in calibrated


def test_messages_between_stages_are_waited_for_in_both(tmp_path: Path) -> None:
    folder = run_with(tmp_path, TOLD, pp=2)
    parts = {line.part: line for line in both_of(folder).lines}
    assert not [part for part in parts if part == "comm pp"]
    assert parts["wait"].measured > 0 and parts["comm dp"].measured > 0


def test_without_traces_exposed_communication_is_one_line(tmp_path: Path) -> None:
    folder = run_with(tmp_path, TOLD)
    for path in (folder / "trace").iterdir():
        path.unlink()
    both = both_of(folder)
    measured = {line.part: line.measured for line in both.lines}
    assert measured["comm"] > 0 and measured["comm dp"] == 0
    assert both.measured == pytest.approx(sum(s.wall for s in shares(collect(folder))) / 2)


def test_page_and_picture_show_it(tmp_path: Path) -> None:
    made = run(run_with(tmp_path, TOLD))
    text = Path(made["report_html"]).read_text()
    assert 'data-testid="expected"' in text
    assert Path(made["report_png"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "told",
    [
        "{",
        "[1]",
        {},
        {"parts": 3},
        {"parts": {"compute": "long"}},
        TOLD | {"error_pct": "some"},
        TOLD | {"mem_mib": "much"},
    ],
)
def test_a_damaged_prediction_harms_nothing(tmp_path: Path, told: object) -> None:
    folder = run_with(tmp_path, told)
    made = run(folder)
    assert 'data-testid="expected"' not in Path(made["report_html"]).read_text()
    assert bool([line for line in made["missing"] if "prediction" in line]) == isinstance(told, str)


def test_no_prediction_is_no_section_and_a_failed_one_is_told(tmp_path: Path) -> None:
    run = collect(write_run(tmp_path / "a", steps=3))
    assert section(run, shares(run)) == "" and not [line for line in run.missing if "prediction" in line]
    run = collect(run_with(tmp_path / "b", {"problem": "cluster.toml:3: <b>"}))
    assert "cluster.toml:3: &lt;b&gt;" in section(run, shares(run))
