"""A scaling study as one picture: speed, efficiency, and where the time of each point goes."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.report import words
from unisono.report.sheet import COLOURS, INK, SOFT, frame

# Parts of a step, by how their names in the waterfall begin; what begins otherwise is "other".
_PARTS = (
    ("arithmetic at peak", "ideal", COLOURS["forward"]),
    ("below peak, recomputation", "products|attention|computed", COLOURS["backward"]),
    ("other kernels, optimiser", "other kernels|optimiser", COLOURS["data"]),
    ("exposed communication", "exposed", COLOURS["comm_exposed"]),
    ("bubble, uneven stages", "bubble|uneven|straggler", COLOURS["wait"]),
    ("host, fixed", "waiting|fixed|data", COLOURS["optim"]),
    ("other", "", COLOURS["other"]),
)


def write(study: Mapping[str, Any], title: str, path: str | Path) -> Path:
    """Draw the object of `planner.sweep.as_json`, whole or not at all. The suffix, .png or .svg, is the format.

    Raises OSError.
    """
    # Imported here because it costs a second, which other verbs must not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [point for point in study["points"] if point["plan"] is not None]
    figure = Figure(figsize=(16, 8.6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    says = study["says"][:1].upper() + study["says"][1:]
    figure.text(0.025, 0.97, textwrap.fill(says, 118), fontsize=15, weight="bold", color=INK, va="top")
    figure.text(0.025, 0.895, f"unisono simulate · {title}", fontsize=11, color=SOFT, va="top")
    grid = figure.add_gridspec(
        2, 2, left=0.07, right=0.975, top=0.81, bottom=0.1, hspace=0.52, wspace=0.16, height_ratios=(1, 1.05)
    )
    grows = study["key"] in ("devices", "nodes")
    _speed(figure.add_subplot(grid[0, 0]), points, study, grows)
    _efficiency(figure.add_subplot(grid[0, 1]), points, study, grows)
    _parts(figure.add_subplot(grid[1, :]), points, study)
    buffer = io.BytesIO()
    kind = Path(path).suffix.removeprefix(".")
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return write_whole(path, buffer.getvalue())


def _speed(axes: Any, points: Sequence[Mapping[str, Any]], study: Mapping[str, Any], grows: bool) -> None:
    frame(axes, f"Tokens per second, by {_noun(study)}")
    xs, ys = [p["value"] for p in points], [p["tokens_per_s"] for p in points]
    if grows and points:
        ideal = [ys[0] * x / xs[0] for x in xs]
        axes.plot(xs, ideal, color=COLOURS["wait"], lw=1.6, ls="--", label="as the first point")
    axes.plot(xs, ys, color=COLOURS["forward"], lw=2.2, marker="o", ms=5, label="the best plan")
    _log(axes, xs)
    if grows:
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.set_ylim(0, 1.12 * max(ys, default=1.0))
    axes.yaxis.set_major_formatter(lambda value, _: words.count(value))
    axes.legend(frameon=False, fontsize=11, loc="best")


def _efficiency(
    axes: Any, points: Sequence[Mapping[str, Any]], study: Mapping[str, Any], grows: bool
) -> None:
    what = "Efficiency beside the first point" if grows else "Speed beside the first point"
    frame(axes, f"{what}, and share of peak (MFU)")
    xs, ys = [p["value"] for p in points], [100 * p["efficiency"] for p in points]
    axes.plot(
        xs, ys, color=COLOURS["forward"], lw=2.2, marker="o", ms=5, label="efficiency" if grows else "speed"
    )
    mfu = [100 * p["mfu"] for p in points]
    axes.plot(xs, mfu, color=COLOURS["backward"], lw=1.8, marker="s", ms=4, label="MFU")
    if grows:
        axes.axhline(50, color=COLOURS["comm_exposed"], lw=1.2, ls=":", label="half")
    for point in study["points"]:
        if point["plan"] is None:
            axes.axvline(point["value"], color=COLOURS["comm_exposed"], lw=1.2, alpha=0.5)
    _log(axes, [p["value"] for p in study["points"]])
    axes.set_ylim(0, 1.1 * max(100.0, *ys) if ys else 100)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    axes.legend(frameon=False, fontsize=11, loc="best")


def _parts(axes: Any, points: Sequence[Mapping[str, Any]], study: Mapping[str, Any]) -> None:
    """One stacked bar for each point: shares of its step."""
    frame(axes, "Where a step goes", grid=False)
    bottoms = [0.0] * len(points)
    for name, begins, colour in _PARTS:
        shares = [100 * _share(point, begins) for point in points]
        if max(shares, default=0.0) < 0.05:
            continue
        axes.bar(range(len(points)), shares, bottom=bottoms, width=0.78, color=colour, label=name)
        for at, (share, bottom) in enumerate(zip(shares, bottoms, strict=True)):
            if share > 6:
                ink = INK if colour in (COLOURS["wait"], COLOURS["data"]) else "white"
                axes.text(
                    at, bottom + share / 2, f"{share:.0f} %", ha="center", va="center", fontsize=10, color=ink
                )
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_xticks(range(len(points)), [f"{_said(p['value'])}\n{_short(p['plan'])}" for p in points])
    axes.tick_params(axis="x", labelsize=9.5 if len(points) <= 8 else 8)
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_ylim(0, 100)
    axes.set_yticks([])
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles, labels, ncols=len(labels), frameon=False, fontsize=10.5, loc="lower right",
        bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, handlelength=1.0, handleheight=1.0, columnspacing=1.2,
    )  # fmt: skip


def _share(point: Mapping[str, Any], begins: str) -> float:
    """Of a step; negative parts (a shorter chain than the busiest) are none."""
    total = sum(max(0.0, part["seconds"]) for part in point["waterfall"])
    known = tuple(word for _, some, _ in _PARTS for word in some.split("|") if word)
    found = 0.0
    for part in point["waterfall"]:
        own = (
            part["what"].startswith(tuple(begins.split("|")))
            if begins
            else not part["what"].startswith(known)
        )
        found += max(0.0, part["seconds"]) if own else 0.0
    return found / total


def _short(plan: str) -> str:
    """The mesh, a few words a line."""
    axes = ("dp", "shard", "tp", "cp", "ep", "pp")
    mesh = [word for word in plan.split() if word.partition("=")[0] in axes]
    return "\n".join(" ".join(mesh[i : i + 2]) for i in range(0, len(mesh), 2))


def _noun(study: Mapping[str, Any]) -> str:
    noun = str(study["key"]).replace("_", " ")
    return f"{noun}, weak scaling" if study["weak"] else noun


def _said(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _log(axes: Any, xs: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(xs), [_said(x) for x in xs], fontsize=10 if len(xs) <= 10 else 8.5)
    axes.minorticks_off()
