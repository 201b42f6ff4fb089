"""Routers' loads and a codec's error are on the page; what is damaged is left out, and other runs have no section."""

import json
from pathlib import Path

from tests.report.runs import write_run
from unisono.report import sections
from unisono.report.collect import collect
from unisono.spec.words import percent

ROUTER = {"busiest": [1.5, 2.5], "idlest": [0.5, 0.25], "entropy": [2.0, 1.0], "dropped": [0.0, 0.125]}


def with_values(folder: Path, key: str, values: list[object]) -> Path:
    """A run whose steps have these values under a key."""
    write_run(folder, steps=6)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{**line, key: value} for line, value in zip(lines, values, strict=False)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_row_for_each_sparse_layer(tmp_path: Path) -> None:
    page = sections.experts(collect(with_values(tmp_path / "run", "router", [ROUTER] * 6)))
    assert 'data-testid="experts"' in page and percent(0.125) in page
    assert all(f">{number}<" in page for number in ("1.50", "2.50", "0.25", "1.00"))


def test_damaged_lines_and_other_models_have_no_experts(tmp_path: Path) -> None:
    empty = {name: [] for name in ROUTER}
    damaged = ({}, "x", {**ROUTER, "entropy": None}, {**ROUTER, "idlest": [1.0]}, empty)
    for i, router in enumerate(damaged):
        assert sections.experts(collect(with_values(tmp_path / f"run{i}", "router", [router] * 6))) == ""


def test_the_mean_of_a_codecs_samples(tmp_path: Path) -> None:
    assert sections.codec_error(collect(write_run(tmp_path / "none", steps=6))) == ""
    folder = with_values(tmp_path / "run", "codec_error", [None, 0.25, 0.75, "x", None, None])
    page = sections.codec_error(collect(folder))
    assert percent(0.5) in page and "2 samples" in page
