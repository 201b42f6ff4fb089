"""`unisono report RUN`: the page, the picture and the verdict of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.report import analyse, html, png
from unisono.report.collect import collect, find


def run(run_dir: str | Path, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write `report.html` and `report.png` into the run folder; also for a folder of runs, meaning its latest.

    Options: `png` (default True), `out` (folder to write to instead). Returns `report_html`, `report_png` (None if
    not wanted), `verdict`, `missing` and `run_dir`. Raises UsageError if there is no run, OSError if the folder
    cannot be written.
    """
    options = options or {}
    folder = find(run_dir)
    facts = collect(folder)
    out = Path(options.get("out") or folder)
    page = html.write(facts, out / "report.html")
    picture = png.write(facts, out / "report.png") if options.get("png", True) else None
    found = analyse.shares(facts)
    verdict = analyse.judge(facts, found, analyse.pipeline_of(facts))
    return {
        "schema_version": 1,
        "run_dir": str(folder),
        "report_html": str(page),
        "report_png": str(picture) if picture else None,
        "verdict": verdict.sentence,
        "advice": verdict.advice,
        "missing": list(facts.missing),
    }
