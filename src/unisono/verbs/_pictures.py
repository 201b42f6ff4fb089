"""The pictures of `unisono simulate`: the planner's answer handed to the report's pen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.observe.trace import write_groups
from unisono.planner.simulate import Answer
from unisono.planner.timeline import timeline
from unisono.report.forecast import Forecast, write, write_picture
from unisono.report.placed import lanes
from unisono.spec.errors import UsageError

_OTHERS = (".svg", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".json")  # no folder is called so


def pictures(answer: Answer, facts: Mapping[str, Any], out: str | None, trace: str | None) -> list[str]:
    """Writes what is asked for and returns the paths. out: FILE.html or FILE.png, else a folder for
    `simulate.html` and `simulate.png`. Raises UsageError, OSError."""
    if out is not None and Path(out).suffix.lower() in _OTHERS:
        what = f"--out {out}: a priced plan is drawn as .html or .png"
        raise UsageError(what, where="--out", fix=f"--out {Path(out).with_suffix('.png')}", code="C04")
    step = timeline(answer.question, answer.price)
    names = [
        f"pp={row}" if len(step.timetable.rows) > 1 else "all ranks"
        for row in range(len(step.timetable.rows))
    ]
    shown = Forecast(facts, step.placed, step.after, names, step.bubble)
    written: list[Path] = []
    if out is not None:
        path = Path(out)
        kind = path.suffix if path.suffix in (".html", ".png") else ""
        if kind != ".png":
            written.append(write(shown, path if kind else path / "simulate.html"))
        if kind != ".html":
            written.append(write_picture(shown, path if kind else path / "simulate.png"))
    if trace is not None:
        written.append(write_groups(trace, {"simulated": lanes(step.placed, names, step.after)}))
    return [str(path) for path in written]
