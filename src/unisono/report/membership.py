"""Who took part in a run, and when: its `history.jsonl` as a band for each rank, and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.report import html, picture
from unisono.report.collect import Record, RunRecord
from unisono.report.picture import Bar, BarChart, BarRow
from unisono.report.verdict.evidence import STACKED
from unisono.spec import words

ROWS = 16
"""Ranks that are drawn: of more, those that were lost, and the first."""
SHORT = 12
"""Rows of a table that need not be opened."""
TRAINS, WAITS, GONE = "forward", "wait", "comm_exposed"
KEYS = {TRAINS: "trains", WAITS: "meets the others anew", GONE: "lost, until it trains again"}
_SAYS = KEYS | {GONE: "is lost"}
HEADS = ("at", "what", "going on after step", "took")
_NAMES = {"start": "started", "end": "ended in good order", "met": "all have met"}
_ABOVE = ("supervisor", "helper")  # with whom all ranks are lost


@dataclass(slots=True)
class _Drawn:
    """Bars until now. since: of each rank, from when on and as what; ranks that are not there have none."""

    bars: list[tuple[int, float, float, str]] = field(default_factory=list)
    since: dict[int, tuple[float, str]] = field(default_factory=dict)

    def becomes(self, rank: int, at: float, colour: str) -> None:
        """From `at` on the rank is something else; "": not there."""
        begun, was = self.since.pop(rank, (at, ""))
        if was and at > begun:
            self.bars.append((rank, begun, at, was))
        if colour:
            self.since[rank] = (at, colour)


def changes(run: RunRecord) -> list[Record]:
    """The lines of a run's history, each with the `seconds` since the first of them in the place of its time."""
    if not run.history:
        return []
    first = run.history[0]["at"]
    return [
        {
            "seconds": round(line["at"] - first, 3),
            **{key: value for key, value in line.items() if key != "at"},
        }
        for line in run.history
    ]


def section(run: RunRecord) -> str:
    """The band and the table; nothing of a run that was begun once and lost nobody."""
    drawn = chart(run)
    if drawn is None:
        return ""
    return html.section(
        "members", drawn.title, html.bars(drawn), html.table(HEADS, rows(changes(run)), numeric=2)
    )


def chart(run: RunRecord) -> BarChart | None:
    """A row a rank: when it trained, met the others anew, was lost. None where nothing of that kind happened."""
    lines = changes(run)
    if not any(line["event"] not in ("start", "end") for line in lines[1:]) and _count(lines, "start") < 2:
        return None
    bars, end = _bars(lines, _rest(run, lines))
    lost = {int(who) for line in lines for who in line.get("lost") or () if str(who).isdigit()}
    ranks = sorted({rank for rank, *_ in bars})
    if len(ranks) > ROWS:
        ranks = sorted([*sorted(lost)[:ROWS], *(rank for rank in ranks if rank not in lost)][:ROWS])
    rows = {rank: row for row, rank in enumerate(ranks)}
    drawn = [
        Bar(rows[rank], start, stop, colour, hover=f"rank {rank} {_SAYS[colour]}: at {words.seconds(start)}"
            f" for {words.seconds(stop - start)}")
        for rank, start, stop, colour in bars if rank in rows
    ]  # fmt: skip
    losses, starts = _count(lines, "lost"), _count(lines, "start")
    title = f"Who took part: {_several(losses, 'loss', 'es')}, {_several(starts, 'start')}"
    names = [BarRow(f"rank {rank}") for rank in ranks]
    return BarChart(title, names, drawn, end, ticks=picture.time_ticks(0.0, end), keys=KEYS, tall=20)


def _several(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def _count(lines: Sequence[Record], event: str) -> int:
    return sum(line["event"] == event for line in lines)


def _bars(lines: Sequence[Record], rest: float) -> tuple[list[tuple[int, float, float, str]], float]:
    """(rank, begin, end, colour) of each stretch, and where the last ends. rest: seconds after the last line."""
    drawn, world = _Drawn(), 1
    for line in lines:
        at = line["seconds"]
        world = int(line.get("ranks", world))
        match line["event"]:
            case "start" | "met":
                for rank in {*range(world), *drawn.since}:
                    drawn.becomes(rank, at, TRAINS if rank < world else "")
            case "lost":
                names = [str(who) for who in line.get("lost") or ()]
                everybody = bool(line.get("whole")) or any(name in _ABOVE for name in names)
                for rank in {*range(world), *drawn.since}:
                    gone = everybody or str(rank) in names or drawn.since.get(rank, (0.0, ""))[1] == GONE
                    drawn.becomes(rank, at, (GONE if gone else WAITS) if rank < world else "")
            case "end":
                for rank in [*drawn.since]:
                    drawn.becomes(rank, at, "")
    end = (lines[-1]["seconds"] + rest) or 1.0
    for rank in [*drawn.since]:
        drawn.becomes(rank, end, "")
    return drawn.bars, end


def _rest(run: RunRecord, lines: Sequence[Record]) -> float:
    """Seconds of the steps after the last line, of a run that goes on or was killed with nobody to tell."""
    if lines[-1]["event"] not in ("start", "met"):
        return 0.0
    since = lines[-1].get("step", 0)
    times = [
        step["time"] for step in run.steps if step["step"] > since and isinstance(step.get("time"), dict)
    ]
    return sum(float(time.get(part) or 0.0) for time in times for part in STACKED)


def rows(lines: Sequence[Record]) -> list[list[str]]:
    """A row, under `HEADS`, for each beginning and end, and for each loss with what came of it."""
    rows: list[list[str]] = []
    down, before = None, dict[str, object]()
    for line in lines:
        step, other = str(line.get("step", "")), _other(line, before)
        before |= {key: line[key] for key in ("ranks", "plan") if key in line}
        if line["event"] == "lost":
            if down is None:
                down = line["seconds"]
                changed = "changed" if not line.get("lost") and line.get("why") else "lost"
                rows.append([_at(line), f"{changed}: {_who(line)}{other and f'; now {other}'}", "", ""])
            else:  # before all had met again
                rows[-1][1] += f"; {_who(line)}"
        elif line["event"] in ("start", "met") and down is not None:
            rows[-1][1:] = [
                f"{rows[-1][1]}{other and f'; now {other}'}",
                step,
                words.seconds(line["seconds"] - down),
            ]
            down = None
        else:
            name = _NAMES.get(line["event"], line["event"])
            rows.append([_at(line), f"{name}{other and f': {other}'}", step, ""])
    return rows


def _at(line: Record) -> str:
    return words.seconds(line["seconds"]) if line["seconds"] else "0"


def _who(line: Record) -> str:
    """`rank 1 (killed by SIGKILL)`."""
    lost = [f"{f'rank {who}' if who.isdigit() else who} ({why})" for who, why in line.get("lost", {}).items()]
    why = "the whole run" if line.get("whole") else "a connection between ranks"
    return ", ".join(lost) or str(line.get("why") or why)


def _other(line: Record, before: Record) -> str:
    """What is another than before: `3 ranks, dp=3, hosts gone: b`."""
    said = []
    if line.get("ranks", before.get("ranks")) != before.get("ranks"):
        said.append(_several(line["ranks"], "rank"))
    if line.get("plan", before.get("plan")) != before.get("plan"):
        said.append(str(line["plan"]))
    return ", ".join([*said, *(f"hosts {how}: {hosts}" for how, hosts in _hosts(line.get("hosts")))])


def _hosts(record: object) -> list[tuple[str, str]]:
    """`{"gone": ["b"], "joined": []}` in words; a plain list is those that there are."""
    if isinstance(record, dict):
        return [(how, ", ".join(map(str, hosts))) for how, hosts in record.items() if hosts]
    return [("there", ", ".join(map(str, record)))] if isinstance(record, list) else []
