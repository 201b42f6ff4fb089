"""What routers tell is on the page, and what is damaged is left out."""

import json
from pathlib import Path

from tests.report.runs import write_run
from unisono.report import sections
from unisono.report.collect import collect
from unisono.spec.words import percent

TOLD = {"busiest": [1.5, 2.5], "idlest": [0.5, 0.25], "entropy": [2.0, 1.0], "dropped": [0.0, 0.125]}


def with_routers(folder: Path, told: object) -> Path:
    write_run(folder, steps=6)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "router": told}) + "\n" for line in lines))
    return folder


def test_a_row_for_each_sparse_layer(tmp_path: Path) -> None:
    page = sections.experts(collect(with_routers(tmp_path / "run", TOLD)))
    assert 'data-testid="experts"' in page and percent(0.125) in page
    assert all(f">{number}<" in page for number in ("1.50", "2.50", "0.25", "1.00"))


def test_damaged_lines_and_other_models_have_none(tmp_path: Path) -> None:
    damaged = ({}, "x", {**TOLD, "entropy": None}, {**TOLD, "idlest": [1.0]}, {name: [] for name in TOLD})
    for i, told in enumerate(damaged):
        assert sections.experts(collect(with_routers(tmp_path / f"run{i}", told))) == ""
