"""The ranks of a run as somebody sees them who is none of them: what each says, or what its kernel says. No torch."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.launch import inspect_folder, inspect_schema
from unisono.launch.inspect_folder import RankProcess
from unisono.launch.rank_status import RankStatus, process_state
from unisono.launch.run.verdict import differing

NEAR = 3.0
"""Seconds that ranks of this host get to answer: the question is read once a second."""
FAR = 15.0
"""Seconds that ranks of other hosts get: their file system may be slow, and one may have to look at its neighbour."""


@dataclass(frozen=True)
class InspectedRank:
    """One rank as it is now.

    who: its process; None if it was never there, or has left. frames: file, line and name of each frame of its main
    thread, innermost first. calls: its latest calls in each group. kernel: what its kernel says. since: seconds since
    its last step, None if not known. usual: seconds that a step takes. clashed: whether its backend has got a message
    that does not fit. spoke: whether it answered itself.
    """

    status: RankStatus
    who: RankProcess | None
    frames: Sequence[Sequence[Any]] = ()
    calls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kernel: Mapping[str, Any] = field(default_factory=dict)
    since: float | None = None
    usual: float | None = None
    clashed: bool = False
    spoke: bool = False


def look(folder: Path, ranks: Sequence[RankProcess]) -> list[InspectedRank]:
    """Return all ranks of a run, by number. If each host has a folder of its own, return the ranks of this host."""
    reports = _answers(folder, ranks)
    views = {process.rank: _witness(process, reports.get(process.rank)) for process in ranks}
    if not ranks[0].private:
        missing = set(range(ranks[0].world)) - views.keys()
        views |= {rank: InspectedRank(RankStatus(rank, "gone"), None) for rank in missing}
    return [views[rank] for rank in sorted(views)]


def _answers(folder: Path, ranks: Sequence[RankProcess]) -> dict[int, dict[str, Any]]:
    """Return the reports of ranks. One that cannot answer may have a report of another rank of its host."""
    reports: dict[int, dict[str, Any]] = {}
    # Where the folder cannot be written, nobody hears.
    with suppress(OSError), inspect_folder.asking(folder) as token:
        begun = time.monotonic()
        while waiting := [it for it in ranks if it.rank not in reports and _may_answer(it)]:
            for process in waiting:
                if (report := inspect_folder.answer_of(folder, process.rank, token)) is not None:
                    reports[process.rank] = report
            far = any(not process.is_here() and process.rank not in reports for process in ranks)
            if time.monotonic() - begun > (FAR if far else NEAR):
                break
            time.sleep(0.02)
    return reports


def _may_answer(process: RankProcess) -> bool:
    """Whether a rank may still answer. One that is stopped or has ended will not."""
    return not process.is_here() or not (process.has_gone() or process_state(process.pid) in ("T", "t"))


def _witness(process: RankProcess, report: Mapping[str, Any] | None) -> InspectedRank:
    report = inspect_schema.report(report) if report else None  # None: it failed, or is of another version
    spoke = report is not None and "calls" in report
    if report is None:
        silent = {"status": {"rank": process.rank, "state": "silent", "host": process.host}}
        report = inspect_folder.seen(process) if process.is_here() else silent
    keys = ("frames", "calls", "kernel", "since", "usual", "clashed")
    rest: dict[str, Any] = {key: report[key] for key in keys if key in report}
    return InspectedRank(
        replace(RankStatus(**report["status"]), rank=process.rank), process, spoke=spoke, **rest
    )


def mismatched(ranks: Sequence[InspectedRank]) -> tuple[list[RankStatus], str]:
    """(what ranks have called where their calls of a group differ first, which call), or nothing where none differs."""
    labels = dict.fromkeys(label for view in ranks for label in view.calls)
    for label in labels:
        calls = {view.status.rank: view.calls[label]["calls"] for view in ranks if label in view.calls}
        stands = {view.status.rank: view.status for view in ranks}
        for number in sorted({int(n) for group in calls.values() for n in group}):
            answers = [(rank, group[str(number)]) for rank, group in calls.items() if str(number) in group]
            called = differing([[_answer(stands[rank], call)] for rank, call in answers])
            if called:
                return called, f"{label} {number}"
    return [], ""


def _answer(status: RankStatus, call: Mapping[str, Any]) -> dict[str, Any]:
    facts = {key: call[key] for key in ("part", "op", "place", "odd")}
    return {"says": call["says"], **vars(replace(status, state="called", **facts))}
