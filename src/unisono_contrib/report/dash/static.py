"""`unisono compare`: the page of the dash as one file that needs no server, with its panels inside."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.report.analyse import analyse
from unisono.report.collect import RunRecord
from unisono_contrib.report import compare_page
from unisono_contrib.report.compare import Comparison
from unisono_contrib.report.dash import beside, panels, shell
from unisono_contrib.report.dash.heat import heat
from unisono_contrib.report.dash.lateness import LatenessMap
from unisono_contrib.report.dash.panels import Panel

_WIDE, _TALL = 1200, 400  # pixels of a heat map that cannot be asked for another


def write(comparison: Comparison, facts: Mapping[str, Any], out: Path) -> list[Path]:
    """Write FILE.html, and the sheet beside it; or the sheet alone, FILE.png or FILE.svg. Raises OSError."""
    if out.suffix != ".html":
        return [compare_page.draw(comparison, facts, out)]
    sheet = compare_page.draw(comparison, facts, out.with_suffix(".png"))
    return [write_whole(out, page(comparison, facts)), sheet]


def page(comparison: Comparison, facts: Mapping[str, Any]) -> str:
    """The whole page as text: the runs beside each other, then each by itself."""
    names = [run.name for run in comparison.runs]
    shown = [{"run": -1, **panel} for panel in beside.of_comparison(comparison, facts)]
    for at, run in enumerate(comparison.runs):
        shown += [{"run": at, **panel} for panel in of_run(run.record, run.name)]
    about = {"alone": True, "boot": "", "number": 0, "runs": names, "prices": False}
    texts = (json.dumps(panel, separators=(",", ":"), allow_nan=False, default=str) for panel in shown)
    return shell.alone(", ".join(names), about, f"[{','.join(texts)}]")


def of_run(run: RunRecord, name: str) -> list[Panel]:
    """All panels of a run that ask no server."""
    verdict = analyse(run)
    last = run.history[-1]["at"] if run.history else 0.0
    shown = [*panels.figures(run, verdict, last, name), *panels.means(run, verdict)]
    late = LatenessMap()
    for facts in run.ranks:
        late.places[facts.rank] = facts.coords
        late.put(facts.rank, facts.steps)
    late.settle(late.steps)
    if late.ranks > 1:
        tile = late.tile((0, late.ranks), (0, late.steps), _WIDE, _TALL, by_cost=True)
        shown.append(heat(late, 1, True) | {"tile": base64.b64encode(tile).decode()})
    return shown
