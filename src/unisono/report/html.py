"""`report.html`: one file that needs nobody: no request, no library, no network."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from unisono.observe.files import write_whole
from unisono.report import chart, expected, lanes, words
from unisono.report.analyse import (
    PARTS,
    Finding,
    TimeShares,
    bytes_table,
    grouped,
    judge,
    peak_memory,
    percent,
    pipeline_of,
    shares,
)
from unisono.report.collect import Record, RunRecord

# The page may not fetch anything, and the browser is told so.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(run: RunRecord) -> str:
    """The whole page as text; sections without data say so or are left out."""
    found, pipeline = shares(run), pipeline_of(run)
    verdict = judge(run, found, pipeline)
    body = [
        _header(run, verdict),
        _tiles(run, found),
        _missing(run),
        _curves(run),
        _times(found),
        expected.section(run, found),
        lanes.timeline(run),
        lanes.timetables(pipeline),
        lanes.heat(run),
        '<div class="pair">',
        _bytes(run),
        _memory(run),
        "</div>",
        _sample(run),
        '<div class="pair">',
        _again(run),
        _environment(run),
        "</div>",
        _config(run),
    ]
    return document(f"{run.name}: unisono report", body)


def document(title: str, body: Sequence[str]) -> str:
    """A page of the report's look around its sections; it asks nobody for anything."""
    here = Path(__file__)
    css = here.with_name("page.css").read_text(encoding="utf-8")
    script = here.with_name("page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{css}</style></head><body><main>{''.join(body)}</main>"
        f'<div id="tip" role="status"></div><script>{script}</script></body></html>\n'
    )


def write(run: RunRecord, path: str | Path) -> Path:
    """Write the page, whole or not at all. Raises OSError."""
    return write_whole(path, page(run))


def _header(run: RunRecord, verdict: Finding) -> str:
    advice = f'<p class="advice">{escape(verdict.advice)}</p>' if verdict.advice else ""
    return (
        f'<header><p class="run">unisono report · {escape(run.name)} · {escape(str(run.folder))}</p>'
        f'<h1 data-testid="verdict">{escape(verdict.sentence)}</h1>{advice}</header>'
    )


def _tiles(run: RunRecord, found: Sequence[TimeShares]) -> str:
    last = run.steps[-1] if run.steps else {}
    speeds = [r["tokens_per_s"] for r in run.steps[1:] or run.steps if words.is_number(r.get("tokens_per_s"))]
    validated = run.validation
    facts = [("loss", words.number(last.get("loss")), "last step")]
    if validated:
        facts.append(("validation loss", words.number(validated[-1][1]), ""))
    if speeds:
        # The mean over time: steps have the same number of tokens, so their seconds are what to average.
        facts.append(("tokens/s", words.count(len(speeds) / sum(1 / s for s in speeds if s)), "mean"))
    if found:
        facts.append(("time per step", words.seconds(sum(s.wall for s in found) / len(found)), "mean"))
    if run.steps:
        facts.append(("steps", words.count(last["step"] + 1), _tokens(run.steps)))
    ranks = run.summary.get("ranks") or len(run.ranks)
    hosts = len({facts.host for facts in run.ranks if facts.host})
    if ranks:
        facts.append(("ranks", str(ranks), f"on {hosts} hosts" if hosts > 1 else ""))
    tiles = [f"<div><dt>{a}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in facts]
    wide = [("plan", run.plan), ("parity", str(run.summary.get("parity") or ""))]
    rows = [f"<div><dt>{a}</dt><dd>{escape(b)}</dd></div>" for a, b in wide if b]
    return (f'<dl class="tiles" data-testid="tiles">{"".join(tiles)}</dl>' if run.steps or found else "") + (
        f'<dl class="facts" data-testid="facts">{"".join(rows)}</dl>' if rows else ""
    )


def _tokens(steps: Sequence[Record]) -> str:
    tokens = sum(r["tokens"] for r in steps if words.is_number(r.get("tokens")))
    return f"{words.count(tokens)} tokens" if tokens else ""


def _missing(run: RunRecord) -> str:
    return _error(run.error) + (
        '<section class="missing" data-testid="missing"><h2>Missing from this run</h2>'
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in run.missing)}</ul></section>"
        if run.missing
        else ""
    )


def _error(error: Record) -> str:
    if not error:
        return ""
    words_of = ("code", "what", "where", "likely", "try", "rank", "host")
    lines = [f"{key:<8}{error[key]}" for key in words_of if error.get(key) not in (None, "")] or [str(error)]
    text = escape("\n".join(lines))
    return f'<section class="missing"><h2>The error that ended the run</h2><pre>{text}</pre></section>'


def _curves(run: RunRecord) -> str:
    loss, speed = _points(run.steps, "loss"), _points(run.steps, "tokens_per_s")
    lines = [chart.ChartLine("training", loss, "line-a")]
    if len(loss) > 100:
        lines = [
            chart.ChartLine("training, each step", loss, "line-raw"),
            chart.ChartLine("training, smoothed", chart.smooth(loss, max(10, len(loss) // 50)), "line-a"),
        ]
    lines.append(chart.ChartLine("validation", run.validation, "line-b"))
    said = f"Loss from {words.number(loss[0][1])} to {words.number(loss[-1][1])}" if loss else ""
    left = chart.line_chart(lines, said)
    right = chart.line_chart(
        [chart.ChartLine("tokens per second", speed[1:] or speed, "line-a")], "Tokens per second", zero=True
    )
    if not left and not right:
        return '<section><h2>Loss</h2><p class="note">No loss was recorded.</p></section>'
    left = left and f'<section data-testid="loss"><h2>Loss</h2>{left}{_loss_table(run)}</section>'
    right = right and f'<section data-testid="speed"><h2>Speed</h2>{right}</section>'
    return f'<div class="pair">{left}{right}</div>'


def _loss_table(run: RunRecord) -> str:
    every = max(1, len(run.steps) // 12)
    shown = [r for i, r in enumerate(run.steps) if i % every == 0 or i == len(run.steps) - 1]
    rows = [[str(r["step"]), words.number(r.get("loss"), 5), words.number(r.get("lr"), 3)] for r in shown]
    tables = chart.table(("step", "loss", "learning rate"), rows, numeric=3)
    if run.validation:
        validated = [[f"{step:.0f}", words.number(loss, 5)] for step, loss in run.validation[-20:]]
        tables += chart.table(("step", "validation loss"), validated, numeric=2)
    return chart.details("As a table", tables)


def _times(found: Sequence[TimeShares]) -> str:
    if not found:
        return ""
    rows = [
        [f"{s.name} {s.place}", *(words.seconds(s.parts.get(p, 0.0)) for p in PARTS)] for s in grouped(found)
    ]
    heads = ("rank", *(words.PART_NAMES[part] for part in PARTS))
    return (
        '<section data-testid="times"><h2>Where the time of a step goes</h2>'
        f"{chart.stacked_bars(grouped(found))}"
        f"{chart.details('As a table', chart.table(heads, rows, numeric=len(PARTS), first_is_text=True))}</section>"
    )


def _bytes(run: RunRecord) -> str:
    rows = bytes_table(run)
    if not rows:
        said = "One rank sends nothing." if len(run.ranks) == 1 else "No bytes were recorded."
        return f'<section><h2>Bytes sent</h2><p class="note">{said}</p></section>'
    total = sum(n for _, _, n in rows) or 1.0
    cells = [[axis, op, words.nbytes(n), percent(n / total)] for axis, op, n in rows]
    bars = [(f"{axis} {op.replace('_', ' ')}", n) for axis, op, n in rows[:12]]
    return (
        f'<section data-testid="bytes"><h2>Bytes sent in a step, all ranks together: {words.nbytes(total)}</h2>'
        + chart.plain_bars(bars, {name: words.nbytes(n) for name, n in bars})
        + chart.details(
            "As a table", chart.table(("axis", "operation", "per step", "part"), cells, numeric=2)
        )
        + "</section>"
    )


def _memory(run: RunRecord) -> str:
    rows = peak_memory(run)
    if not rows:
        return '<section><h2>Memory</h2><p class="note">No sizes were recorded.</p></section>'
    bars = sorted(rows, key=lambda row: -row[1])[:16] if len(rows) > 16 else rows
    more = (
        f'<p class="note">The {len(bars)} largest of {len(rows)} ranks.</p>' if len(rows) > len(bars) else ""
    )
    return (
        '<section data-testid="memory"><h2>Most memory in use, per rank</h2>'
        + chart.plain_bars(bars, {name: words.mebibytes(size) for name, size in bars})
        + more
        + "</section>"
    )


def _sample(run: RunRecord) -> str:
    text = run.summary.get("sample")
    if not text:
        return ""
    return f'<section data-testid="sample"><h2>What the model writes</h2><pre>{escape(str(text))}</pre></section>'


def again(run: RunRecord) -> str:
    """The command that repeats the run: its resolved recipe is complete, so nothing else is needed."""
    return str(
        run.summary.get("command") or f"unisono train {shlex.quote(str(run.folder / 'config.resolved.toml'))}"
    )


def _again(run: RunRecord) -> str:
    argv = run.environment.get("argv")
    started = " ".join(str(word) for word in argv) if isinstance(argv, list) else ""
    was = f'<p class="note">It was started as: <code>{escape(started)}</code></p>' if started else ""
    return (
        '<section data-testid="again"><h2>RunRecord it again</h2>'
        f'<pre class="command">{escape(again(run))}</pre>{was}</section>'
    )


def _environment(run: RunRecord) -> str:
    env = run.environment
    if not env:
        return '<section><h2>Environment</h2><p class="note">env.json is not there.</p></section>'
    git = env.get("git")
    commit = (
        f"{git.get('commit', '')[:12]}{' with changes' if git.get('changed') else ''}"
        if isinstance(git, dict)
        else ""
    )
    packages = env.get("packages")
    rows = [
        ("host", env.get("host")),
        ("processor", env.get("cpu")),
        ("cores", env.get("cores_usable") or env.get("cores")),
        ("memory", f"{env['memory_gib']} GiB" if env.get("memory_gib") else None),
        ("system", env.get("platform")),
        ("python", env.get("python")),
        *(packages.items() if isinstance(packages, dict) else ()),
        ("commit", commit),
    ]
    cells = [[name, str(value)] for name, value in rows if value]
    variables = env.get("env")
    shown = [[k, str(v)] for k, v in variables.items()] if isinstance(variables, dict) else []
    more = chart.details("Variables", chart.table(("name", "value"), shown)) if shown else ""
    return f'<section data-testid="environment"><h2>Environment</h2>{chart.table((), cells)}{more}</section>'


def _config(run: RunRecord) -> str:
    if not run.config_text:
        return ""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<section data-testid="config"><h2>The recipe, resolved</h2>'
        f'<pre tabindex="0">{escape(run.config_text)}</pre><p class="note">Page written {made}.</p></section>'
    )


def _points(steps: Sequence[Record], key: str) -> list[chart.Point]:
    return [(float(r["step"]), float(r[key])) for r in steps if words.is_number(r.get(key))]
