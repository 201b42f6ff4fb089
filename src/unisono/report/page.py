"""`unisono report RUN`: a run on one page (`report.html`), and its main charts on one sheet (`report.png`)."""

import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.report import (
    analyse,
    charts,
    collectives,
    expected,
    html,
    instruments,
    membership,
    profiles,
    sections,
    sheet,
)
from unisono.report.analyse import Analysis
from unisono.report.collect import Record, RunRecord, collect
from unisono.report.profiles import NO_PROFILE, ProfilePart
from unisono.report.verdict.evidence import STACKED, Prices
from unisono.report.verdict.judge import as_json, no_price
from unisono.report.verdict.waterfall import in_words
from unisono.spec import words
from unisono.spec.finder import sister
from unisono.spec.runs import run_folder
from unisono.spec.words import percent


def run(run_dir: str | Path, price: Prices = no_price) -> dict[str, Any]:
    """Write `report.html` and `report.png` into the run folder; also for a folder of runs, meaning its latest.

    price: of changes, by the planner. Returns `report_html`, `report_png`, `verdict`, `advice` and `judged` (see
    `verdict.judge.RunVerdict`), `sent` (the ledger: bytes per step of all ranks), `members` (who took part, and when),
    `best` (the best checkpoint: its step and value, or None), `early` (why it ended before its last step, or ""),
    `collectives` (waiting and moving by axis, operation and size), `stragglers`, `profile` (None without one),
    `lengths` (of sequences that samplers drew, beside those of trained ones; None without samplers),
    `missing` and `run_dir`. Raises UsageError if there is no run, OSError if the folder cannot be written.
    """
    record = collect(run_folder(run_dir))
    facts, profile = analyse.analyse(record, price), profiles.of(record)
    return {
        "schema_version": 1,
        "run_dir": str(record.folder),
        "report_html": str(write(record, facts, record.folder / "report.html", profile)),
        "report_png": str(picture(record, facts, record.folder / "report.png")),
        "verdict": facts.verdict.sentence,
        "advice": facts.verdict.said,
        "judged": as_json(facts.verdict),
        "mfu": facts.used[-1].after if facts.used else None,
        "mfu_words": in_words(facts.used, record.prediction),
        "waterfall": [asdict(loss) for loss in facts.used],
        "sent": [asdict(line) for line in analyse.ledger(record)],
        "members": membership.changes(record),
        "best": None if record.best is None else {"step": record.best, record.judged_by: record.best_value},
        "early": record.early,
        **collectives.as_json(record),
        "lengths": part.as_json(record) if (part := _drawn(record)) else None,
        "profile": profile.numbers,
        "missing": [*record.missing, *profile.missing],
    }


def write(run: RunRecord, facts: Analysis, path: str | Path, profile: ProfilePart = NO_PROFILE) -> Path:
    """Write the page, whole or not at all. Raises OSError."""
    return write_whole(path, page(run, facts, profile))


def picture(run: RunRecord, facts: Analysis, path: str | Path) -> Path:
    """Draw the sheet, whole or not at all. Raises OSError."""
    both = expected.beside(run, facts.shares)
    rows = [
        [charts.loss(run), charts.speed(run)],
        [membership.chart(run)],
        *instruments.sheet_rows(run),
        [charts.times(analyse.grouped(facts.shares, charts.TIMELINE_ROWS))] if facts.shares else [],
        [expected.chart(both)] if both else [],
        [charts.timeline(run)],
        *([chart] for chart in (charts.timetables(facts.pipeline) if facts.pipeline else ())),
    ]
    said = f"unisono · {run.name}" + (f" · {run.plan}" if run.plan else "")
    return sheet.write(path, facts.verdict.sentence, said, rows)


def page(run: RunRecord, facts: Analysis, profile: ProfilePart = NO_PROFILE) -> str:
    """The whole page as text; sections without data say so or are left out."""
    title = f"unisono report · {run.name} · {run.folder}"
    body = [
        html.head(title, facts.verdict.sentence, facts.verdict.said),
        _tiles(run, facts),
        _missing(run),
        _curves(run),
        membership.section(run),
        instruments.section(run),
        _lengths(run),
        sections.experts(run),
        _times(facts),
        expected.section(run, facts.shares),
        _peak(run, facts),
        _timeline(run),
        _pipeline(facts),
        profile.section,
        _heat(run),
        collectives.section(run),
        html.pair(_bytes(run), _memory(run)),
        _resources(run),
        sections.codec_error(run),
        _sample(run),
        html.pair(_again(run), _environment(run)),
        _config(run),
    ]
    return html.document(f"{run.name}: unisono report", body)


def _tiles(run: RunRecord, facts: Analysis) -> str:
    wide = [
        ("plan", run.plan, ""),
        ("verify", str(run.summary.get("parity") or ""), ""),
        ("ended", run.early, ""),
    ]
    return html.tiles(tile_facts(run, facts)) + html.tiles([w for w in wide if w[1]], "facts")


def tile_facts(run: RunRecord, facts: Analysis) -> list[tuple[str, str, str]]:
    """(name, value, more) of the figures on top of a page; none of a run of which nothing is known."""
    last, shares, validated = run.steps[-1] if run.steps else {}, facts.shares, run.validation
    tiles = [("loss", words.number(last.get("loss")), "last step")]
    if validated:
        tiles.append(("validation loss", words.number(validated[-1][1]), ""))
    if run.best is not None:
        tiles.append(
            ("best checkpoint", f"step {run.best}", f"{run.judged_by} {words.number(run.best_value)}")
        )
    if run.speed:
        tiles.append((f"{run.unit}/s", words.count(run.speed), "mean"))
    if shares:
        tiles.append(("time per step", words.seconds(sum(s.wall for s in shares) / len(shares)), "mean"))
    if run.steps:
        targets = sum(count for _, count in charts.points_of(run.steps, "tokens"))
        said = f"{words.count(targets)} {run.unit}" if targets else ""
        tiles.append(("steps", words.count(last["step"]), said))
    ranks = run.summary.get("ranks") or len(run.ranks)
    hosts = len({rank.host for rank in run.ranks if rank.host})
    if ranks:
        tiles.append(("ranks", str(ranks), f"on {hosts} hosts" if hosts > 1 else ""))
    return tiles if run.steps or shares else []


def _missing(run: RunRecord) -> str:
    parts = []
    if run.error:
        keys = ("code", "what", "where", "likely", "try", "rank", "host")
        known = [f"{key:<8}{run.error[key]}" for key in keys if run.error.get(key) not in (None, "")]
        lines = escape("\n".join(known or [str(run.error)]))
        parts.append(
            f'<section class="missing"><h2>The error that ended the run</h2><pre>{lines}</pre></section>'
        )
    if run.missing:
        lines = "".join(f"<li>{escape(line)}</li>" for line in run.missing)
        parts.append(
            '<section class="missing" data-testid="missing"><h2>Missing from this run</h2>'
            f"<ul>{lines}</ul></section>"
        )
    return "".join(parts)


def _curves(run: RunRecord) -> str:
    loss, speed = charts.loss(run), charts.speed(run)
    if not loss and not speed:
        return html.section("loss", "Loss", html.note("No loss was recorded."))
    return html.pair(
        html.section("loss", "Loss", html.curves(loss), _loss_table(run)) if loss else "",
        html.section("speed", "Speed", html.curves(speed)) if speed else "",
    )


def _loss_table(run: RunRecord) -> str:
    every = max(1, len(run.steps) // 12)
    shown = [r for i, r in enumerate(run.steps) if i % every == 0 or i == len(run.steps) - 1]
    rows = [[str(r["step"]), words.number(r.get("loss"), 5), words.number(r.get("lr"), 3)] for r in shown]
    tables = html.table(("step", "loss", "learning rate"), rows, numeric=3)
    if run.validation:
        validated = [[f"{step:.0f}", words.number(loss, 5)] for step, loss in run.validation[-20:]]
        tables += html.table(("step", "validation loss"), validated, numeric=2)
    return html.details("As a table", tables)


def _times(facts: Analysis) -> str:
    if not facts.shares:
        return ""
    shares = analyse.grouped(facts.shares)
    rows = [[f"{s.name} {s.place}", *(words.seconds(s.parts.get(p, 0.0)) for p in STACKED)] for s in shares]
    table = html.table(("rank", *(words.PART_NAMES[part] for part in STACKED)), rows, numeric=len(STACKED))
    chart = charts.times(shares)
    return html.section("times", chart.title, html.bars(chart), html.details("As a table", table))


def _peak(run: RunRecord, facts: Analysis) -> str:
    """MFU loss by loss; nothing where no peak is known."""
    lines = in_words(facts.used, run.prediction)
    rows = "".join(f"<li>{escape(line)}</li>" for line in lines[1:])
    return html.section("peak", lines[0], f"<ol>{rows}</ol>") if lines else ""


def _timeline(run: RunRecord) -> str:
    chart = charts.timeline(run)
    if chart is None:
        return ""
    more = f" {len(chart.rows)} of {len(run.traces)} ranks are drawn." * (len(run.traces) > len(chart.rows))
    said = (
        f"Numbers are micro-batches.{more} Point at a block for its time. "
        "The same spans are in trace/, for Perfetto or chrome://tracing."
    )
    return html.section("timeline", chart.title, html.bars(chart), html.note(said))


def _pipeline(facts: Analysis) -> str:
    pipeline = facts.pipeline
    if pipeline is None:
        return ""
    which = f", slowest replica ({pipeline.replica})" if pipeline.replica else ""
    return html.section(
        "pipeline",
        f"Pipeline timetable {pipeline.schedule}, step {pipeline.step}{which}",
        *(f"<h3>{escape(chart.title)}</h3>{html.bars(chart)}" for chart in charts.timetables(pipeline)),
        html.note(
            "Both on one time axis; grey is idle. With equal stages and free messages this timetable "
            f"would idle {percent(pipeline.ideal_bubble)}."
        ),
    )


def _heat(run: RunRecord) -> str:
    chart = charts.heat(run)
    if chart is None:
        return ""
    said = (
        "Busy time (a step without waiting and communication) of each rank, beside the median of all ranks at that "
        "step. A dark row is a slow rank, a dark column a slow moment."
    )
    return html.section("heat", "Who is slow, and when", html.bars(chart), html.note(said))


def _bytes(run: RunRecord) -> str:
    chart, rows = charts.sent(run), analyse.ledger(run)
    if chart is None:
        said = "One rank sends nothing." if len(run.ranks) == 1 else "No bytes were recorded."
        return html.section("bytes", "Bytes sent", html.note(said))
    total = sum(row.nbytes for row in rows) or 1.0
    cells = [
        [
            row.axis,
            row.op,
            row.algorithm or "–",
            row.codec or "–",
            words.nbytes(row.nbytes),
            percent(row.nbytes / total),
        ]
        for row in rows
    ]
    table = html.table(("axis", "operation", "algorithm", "codec", "per step", "part"), cells, numeric=2)
    return html.section("bytes", chart.title, html.bars(chart), html.details("As a table", table))


def _memory(run: RunRecord) -> str:
    chart, count = charts.memory(run), len(analyse.peak_memory(run))
    if chart is None:
        return html.section("memory", "Memory", html.note("No sizes were recorded."))
    shown = len(chart.rows)
    more = html.note(f"The {shown} largest of {count} ranks.") if count > shown else ""
    return html.section("memory", chart.title, html.bars(chart), more)


def _drawn(run: RunRecord) -> Any:
    """What reads the sequences that samplers drew, of a run that had some; else None."""
    return sister("unisono.report.lengths") if (run.folder / "samplers").is_dir() else None


def _lengths(run: RunRecord) -> str:
    part = _drawn(run)
    return part.section(run) if part else ""


def _resources(run: RunRecord) -> str:
    """What hosts took of their machines, of a run that sampled it."""
    part = sister("unisono.report.resources") if (run.folder / "resources").is_dir() else None
    return part.section(run) if part else ""


def _sample(run: RunRecord) -> str:
    text = run.summary.get("sample")
    return html.section("sample", "What the model writes", f"<pre>{escape(str(text))}</pre>") if text else ""


def _again(run: RunRecord) -> str:
    """The command that repeats the run, and the one that goes on from it. A run that was resumed is repeated from its
    resolved recipe, which is complete: the command that resumed it would find nothing left to do."""
    folder, argv = shlex.quote(str(run.folder)), run.environment.get("argv")
    command = str(run.summary.get("command") or "")
    if not command or "--resume" in shlex.split(command):
        command = f"unisono train {folder}/config.resolved.toml"
    said = [f'<pre class="command">{escape(command)}</pre>']
    if run.steps:
        further = f"unisono train --resume {folder} --train.steps {2 * run.steps[-1]['step']}"
        said.append(html.note("To train it for as many steps more:") + f"<pre>{escape(further)}</pre>")
    if isinstance(argv, list):
        started = escape(" ".join(str(word) for word in argv))
        said.append(f'<p class="note">It was started as: <code>{started}</code></p>')
    return html.section("again", "Run it again", *said)


def _environment(run: RunRecord) -> str:
    env = run.environment
    if not env:
        return html.section("environment", "Environment", html.note("env.json is not there."))
    packages, variables = (_object(env.get(key)) for key in ("packages", "env"))
    git = _object(env.get("git"))
    rows = [
        ("host", env.get("host")),
        ("CPU", env.get("cpu")),
        ("cores", env.get("cores_usable") or env.get("cores")),
        ("memory", f"{env['memory_gib']} GiB" if env.get("memory_gib") else None),
        ("system", env.get("platform")),
        ("python", env.get("python")),
        *packages.items(),
        ("commit", f"{git.get('commit', '')[:12]}{' with changes' if git.get('changed') else ''}"),
    ]
    cells = [[name, str(value)] for name, value in rows if value]
    shown = html.table(("name", "value"), [[k, str(v)] for k, v in variables.items()])
    more = html.details("Variables", shown) if variables else ""
    return html.section("environment", "Environment", html.table((), cells), more)


def _object(value: object) -> Record:
    return value if isinstance(value, dict) else {}


def _config(run: RunRecord) -> str:
    if not run.config_text:
        return ""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = f'<pre tabindex="0">{escape(run.config_text)}</pre>'
    return html.section("config", "The recipe, resolved", text, html.note(f"Page written {now}."))
