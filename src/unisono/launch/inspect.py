"""The ranks of a run as somebody sees them who is none of them: what each says, or what its kernel says. No torch."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.launch import inspect_folder
from unisono.launch.inspect_folder import RankProcess
from unisono.launch.inspect_schema import GroupCall, RankReport, read_report
from unisono.launch.rank_status import RankStatus, process_state
from unisono.launch.run.verdict import differing

NEAR = 3.0
"""Seconds that ranks of this host get to answer: the question is read once a second."""
FAR = 15.0
"""Seconds that ranks of other hosts get: their file system may be slow, and one may have to look at its neighbour."""


@dataclass(frozen=True)
class InspectedRank(RankReport):
    """One rank as it is now. who: its process; None if it was never there, or has left."""

    who: RankProcess | None = None

    @property
    def spoke(self) -> bool:
        """Whether it answered itself."""
        return self.calls is not None


def look(folder: Path, ranks: Sequence[RankProcess]) -> list[InspectedRank]:
    """Return all ranks of a run, by number. If each host has a folder of its own, return the ranks of this host."""
    reports = _answers(folder, ranks)
    views = {process.rank: _witness(process, reports.get(process.rank)) for process in ranks}
    if not ranks[0].private:
        missing = set(range(ranks[0].world)) - views.keys()
        views |= {rank: InspectedRank(RankStatus(rank, "gone")) for rank in missing}
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


def _witness(process: RankProcess, answer: Mapping[str, Any] | None) -> InspectedRank:
    report = read_report(answer) if answer else None  # None: it failed, or is of another version
    if report is None:
        silent = RankReport(RankStatus(process.rank, "silent", process.host))
        report = inspect_folder.seen(process) if process.is_here() else silent
    status = replace(report.status, rank=process.rank)
    return InspectedRank(**{**vars(report), "status": status, "who": process})


def mismatched(ranks: Sequence[InspectedRank]) -> tuple[list[RankStatus], str]:
    """(what ranks have called where their calls of a group differ first, which call), or nothing where none differs."""
    stands = {view.status.rank: view.status for view in ranks}
    for label in dict.fromkeys(label for view in ranks for label in view.calls or ()):
        calls = {
            view.status.rank: view.calls[label].calls for view in ranks if view.calls and label in view.calls
        }
        for number in sorted({int(n) for group in calls.values() for n in group}):
            answers = [(rank, group[str(number)]) for rank, group in calls.items() if str(number) in group]
            called = differing([[_answer(stands[rank], call)] for rank, call in answers])
            if called:
                return called, f"{label} {number}"
    return [], ""


def _answer(status: RankStatus, call: GroupCall) -> dict[str, Any]:
    facts = {"part": call.part, "op": call.op, "place": call.place, "odd": call.odd}
    return {"says": call.says, **vars(replace(status, state="called", **facts))}
