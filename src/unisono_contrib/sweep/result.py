"""What a sweep came to: the object of `--json`, the table, and the best recipe as a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.config.write import recipe_toml
from unisono.observe.files import write_whole
from unisono.planner.formatting import Column, table
from unisono.spec.words import number
from unisono_contrib.sweep.methods import Conclusion
from unisono_contrib.sweep.progress import SweepProgress, Trial
from unisono_contrib.sweep.spec import SweepSpec

BEST = "best.toml"


def trained(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int, float | None]]:
    """(steps of all trials until then, trial, its step, its metric) of each piece that ended with a value, in order."""
    at, total, rows = dict[int, int](), 0, list[tuple[int, int, int, float | None]]()
    for line in lines:
        if line["event"] == "value":
            total += line["step"] - at.get(line["trial"], 0)
            at[line["trial"]] = line["step"]
            rows.append((total, line["trial"], line["step"], line["value"]))
    return rows


def facts(
    spec: SweepSpec,
    folder: Path,
    progress: SweepProgress,
    lines: Sequence[Mapping[str, Any]],
    conclusion: Conclusion,
) -> dict[str, Any]:
    """The object of `sweep --json`."""
    best = _best(progress, conclusion)
    rows = trained(lines)
    return {
        "sweep": str(folder),
        "method": spec.method.name,
        "metric": spec.config.metric,
        "goal": spec.goal,
        "trials": [_row(trial) for trial in progress.trials],
        "best": None if best is None else {**_row(best), "params": dict(conclusion.params or {})},
        "steps": rows[-1][0] if rows else 0,
        "failures": sum(trial.failures for trial in progress.trials),
        "seconds": sum(line.get("seconds", 0.0) for line in lines if line["event"] == "value"),
        "conclusion": list(conclusion.said),
        **conclusion.facts,
    }


def _best(progress: SweepProgress, conclusion: Conclusion) -> Trial | None:
    """The trial that the conclusion is about; the best by the metric where it is about none."""
    if conclusion.params is None:
        return None
    same = (trial for trial in progress.trials if dict(trial.params) == dict(conclusion.params or {}))
    return next(same, progress.best or progress.trials[0])


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number, "state": str(trial.state), "value": trial.value, "step": trial.step,
        "params": dict(trial.params), "values": [list(pair) for pair in trial.values], "failures": trial.failures,
        "run_dir": trial.run_dir, "source": trial.source, "why": trial.why,
    }  # fmt: skip


def said(progress: SweepProgress, metric: str) -> list[str]:
    """The table, the best trial first."""
    ranked = sorted(progress.trials, key=lambda t: (-t.step, progress.cost(t.value), t.number))
    keys = [*progress.space]
    rows = [
        {
            "trial": trial.name, "state": str(trial.state), "step": trial.step, "value": trial.value,
            **{key: trial.params.get(key) for key in keys}, "run": trial.run_dir or trial.why,
        }
        for trial in ranked
    ]  # fmt: skip
    columns = [
        Column("trial", "trial"), Column("state", "state"), Column("step", "step"), Column(metric, "value", number),
        *(Column(key, key, _value) for key in keys), Column("run", "run"),
    ]  # fmt: skip
    return table(columns, rows)


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def write_best(spec: SweepSpec, folder: Path, conclusion: Conclusion) -> Path | None:
    """The recipe with the best values, to be trained; None where nothing was learnt. Raises OSError."""
    if conclusion.params is None:
        return None
    loaded = spec.loaded(conclusion.params)
    head = [f"# The best of the sweep {spec.origin}.", f"# unisono train {folder / BEST}"]
    named = loaded.recipe.model_copy(update={"plan": str(loaded.plan)})
    return write_whole(folder / BEST, recipe_toml(named, dict(loaded.origins), head))
