"""`unisono report RUN`: the page, the picture and the verdict of a run."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.report import page
from unisono.report.analyse import analyse, ledger
from unisono.report.collect import collect
from unisono.report.membership import changes
from unisono.spec.runs import run_folder


def run(run_dir: str | Path, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write `report.html` and `report.png` into the run folder; also for a folder of runs, meaning its latest.

    Options: `png` (default True), `out` (folder to write to instead). Returns `report_html`, `report_png` (None if
    not wanted), `verdict`, `sent` (the ledger: bytes per step of all ranks), `members` (who took part, and when),
    `missing` and `run_dir`. Raises UsageError if there is no run, OSError if the folder cannot be written.
    """
    options = options or {}
    record = collect(run_folder(run_dir))
    facts = analyse(record)
    out = Path(options.get("out") or record.folder)
    drawn = page.write(record, facts, out / "report.html")
    picture = page.picture(record, facts, out / "report.png") if options.get("png", True) else None
    return {
        "schema_version": 1,
        "run_dir": str(record.folder),
        "report_html": str(drawn),
        "report_png": str(picture) if picture else None,
        "verdict": facts.finding.sentence,
        "advice": facts.finding.advice,
        "sent": [asdict(line) for line in ledger(record)],
        "members": changes(record),
        "missing": list(record.missing),
    }
