"""Several runs beside each other, as panels: the comparison of `unisono compare`, while the runs go on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.report.collect import RunRecord
from unisono_contrib.report import compare, compare_page, compare_words
from unisono_contrib.report.compare import ComparedRun, Comparison, StepMap
from unisono_contrib.report.dash.panels import Panel, bars, lines, text


def panels(names: Sequence[str], records: Sequence[RunRecord]) -> list[Panel]:
    """Of the runs that have made a step; none where fewer than two have. The first is the baseline."""
    runs = [ComparedRun(name, record) for name, record in zip(names, records, strict=True)]
    runs = [run for run in runs if run.progress]
    if len(runs) < 2:
        return []
    comparison = Comparison(runs, compare.target_of(runs[0]))
    return of_comparison(comparison, compare.facts(comparison, _unread))


def of_comparison(comparison: Comparison, facts: Mapping[str, Any]) -> list[Panel]:
    """The same of a comparison and the object of `compare --json`."""
    table = {
        "heads": [*compare_words.HEADS], "rows": compare_words.rows(facts), "numeric": len(compare_words.HEADS) - 2,
        "open": True,
    }  # fmt: skip
    said = [compare_words.footnote(facts), *compare_words.notes(facts)]
    shown: list[Panel] = [
        {"id": "beside-head", "kind": "sentence", "title": "", "sentence": compare_words.headline(facts),
         "said": compare_words.bits_line(facts), "half": False},
        {"id": "beside-runs", "kind": "bars", "title": "Runs beside each other", "charts": [], "table": table,
         "note": " ".join(said), "half": False},
    ]  # fmt: skip
    for at, chart in enumerate(compare_page.losses(comparison)):
        shown.append(lines(f"beside-loss-{at}", chart))
    shown.append(text("beside-bits", "Where bits differ", compare_words.sentences(facts)))
    for at, chart in enumerate(compare_page.target_bars(facts)):
        shown.append(bars(f"beside-target-{at}", chart))
    for at, chart in enumerate(compare_page.replica_curves(comparison)):
        shown.append(lines(f"beside-replicas-{at}", chart))
    for at, chart in enumerate(compare_page.histograms(comparison)):
        shown.append(bars(f"beside-staleness-{at}", chart))
    if facts["differences"]:
        heads = ["key", *compare_words.names(facts)]
        keys = {"heads": heads, "rows": compare_words.key_rows(facts), "numeric": 0, "open": True}
        title = "Keys in which the recipes differ"
        shown.append(
            {"id": "beside-keys", "kind": "bars", "title": title, "charts": [], "table": keys, "half": True}
        )
    shown.append(text("beside-again", "Compare them again", [compare_words.command(facts)]))
    return shown


def _unread(a: Path, b: Path, beside: StepMap) -> Mapping[str, Any]:
    """Checkpoints are compared by `unisono compare` alone: that takes torch, and reads whole models."""
    return {"compared": [], "first": None, "unread": []}
