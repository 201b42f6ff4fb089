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
"""Seconds that ranks get to answer: they look once a second."""
FAR = 15.0
"""The same for ranks of other hosts, whose file system may be slow, and which may have to look at a neighbour."""


@dataclass(frozen=True)
class InspectedRank:
    """One rank as it is now. who: None where it was never there, or has left. frames: of its main thread, innermost
    first, each file, line and name. calls: of each group. kernel: what its kernel says. since: seconds since its last
    step, None if not known. usual: seconds of a step. clashed: its backend has got a message that does not fit. spoke:
    whether it answered itself."""

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
    """All ranks of a run, by number; of one whose hosts have folders of their own, those of this host."""
    reports = _answers(folder, ranks)
    views = {process.rank: _witness(process, reports.get(process.rank)) for process in ranks}
    if not ranks[0].private:
        missing = set(range(ranks[0].world)) - views.keys()
        views |= {rank: InspectedRank(RankStatus(rank, "gone"), None) for rank in missing}
    return [views[rank] for rank in sorted(views)]


def _answers(folder: Path, ranks: Sequence[RankProcess]) -> dict[int, dict[str, Any]]:
    """What ranks say of themselves, or others of their host for them."""
    reports: dict[int, dict[str, Any]] = {}
    with (
        suppress(OSError),
        inspect_folder.asking(folder) as token,
    ):  # a folder that cannot be written: nobody hears
        begun = time.monotonic()
        while waiting := [
            process for process in ranks if process.rank not in reports and _may_answer(process)
        ]:
            for process in waiting:
                if (report := inspect_folder.answer_of(folder, process.rank, token)) is not None:
                    reports[process.rank] = report
            far = any(not process.is_here() and process.rank not in reports for process in ranks)
            if time.monotonic() - begun > (FAR if far else NEAR):
                break
            time.sleep(0.02)
    return reports


def _may_answer(process: RankProcess) -> bool:
    """One that is seen to be stopped, or to have ended, will not."""
    return not process.is_here() or not (process.has_gone() or process_state(process.pid) in ("T", "t"))


def _witness(process: RankProcess, report: Mapping[str, Any] | None) -> InspectedRank:
    report = (
        None if report is None else inspect_schema.report(report)
    )  # None: it failed, or is of another version
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
