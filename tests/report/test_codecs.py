"""The sampled error of a codec is on the page, and runs without one have no such section."""

import json
from pathlib import Path

from tests.report.runs import write_run
from unisono.report import sections
from unisono.report.collect import collect
from unisono.spec.words import percent


def test_the_mean_of_the_samples_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=6)
    assert sections.codec_error(collect(folder)) == ""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, error in zip(lines, (None, 0.25, 0.75, "x"), strict=False):
        line["codec_error"] = error
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = sections.codec_error(collect(folder))
    assert percent(0.5) in page and "2 samples" in page
