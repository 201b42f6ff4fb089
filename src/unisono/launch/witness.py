"""The ranks of a run as somebody sees them who is none of them: what each says, or what its kernel says. No torch."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.launch import alive, testimony
from unisono.launch.alive import Living
from unisono.launch.run.verdict import differing
from unisono.launch.stand import Stand, process_state

NEAR = 3.0
"""Seconds that ranks get to answer: they look once a second."""
FAR = 15.0
"""The same for ranks of other hosts, whose file system may be slow, and which may have to look at a neighbour."""


@dataclass(frozen=True)
class Witness:
    """One rank as it is now. who: None where it was never there, or has left. frames: of its main thread, innermost
    first, each file, line and name. calls: of each group. kernel: what its kernel says. since: seconds since its last
    step, None if not known. usual: seconds of a step. clashed: its backend has got a message that does not fit. spoke:
    whether it answered itself."""

    stand: Stand
    who: Living | None
    frames: Sequence[Sequence[Any]] = ()
    calls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kernel: Mapping[str, Any] = field(default_factory=dict)
    since: float | None = None
    usual: float | None = None
    clashed: bool = False
    spoke: bool = False


def look(folder: Path, ranks: Sequence[Living]) -> list[Witness]:
    """All ranks of a run, by number; of one whose hosts have folders of their own, those of this host."""
    told = _answers(folder, ranks)
    found = {one.rank: _witness(one, told.get(one.rank)) for one in ranks}
    if not ranks[0].private:
        missing = set(range(ranks[0].world)) - found.keys()
        found |= {rank: Witness(Stand(rank, "gone"), None) for rank in missing}
    return [found[rank] for rank in sorted(found)]


def _answers(folder: Path, ranks: Sequence[Living]) -> dict[int, dict[str, Any]]:
    """What ranks say of themselves, or others of their host for them."""
    told: dict[int, dict[str, Any]] = {}
    with suppress(OSError), alive.asking(folder) as token:  # a folder that cannot be written: nobody hears
        begun = time.monotonic()
        while waiting := [one for one in ranks if one.rank not in told and _may_answer(one)]:
            for one in waiting:
                if (said := alive.said(folder, one.rank, token)) is not None:
                    told[one.rank] = said
            far = any(not one.is_here() and one.rank not in told for one in ranks)
            if time.monotonic() - begun > (FAR if far else NEAR):
                break
            time.sleep(0.02)
    return told


def _may_answer(one: Living) -> bool:
    """One that is seen to be stopped, or to have ended, will not."""
    return not one.is_here() or not (one.has_gone() or process_state(one.pid) in ("T", "t"))


def _witness(one: Living, told: Mapping[str, Any] | None) -> Witness:
    told = None if told is None else testimony.said(told)  # None: it failed, or is of another version
    spoke = told is not None and "calls" in told
    if told is None:
        silent = {"stand": {"rank": one.rank, "state": "silent", "host": one.host}}
        told = alive.seen(one) if one.is_here() else silent
    keys = ("frames", "calls", "kernel", "since", "usual", "clashed")
    rest: dict[str, Any] = {key: told[key] for key in keys if key in told}
    return Witness(replace(Stand(**told["stand"]), rank=one.rank), one, spoke=spoke, **rest)


def mismatched(ranks: Sequence[Witness]) -> tuple[list[Stand], str]:
    """(what ranks have called where their calls of a group differ first, which call), or nothing where none differs."""
    labels = dict.fromkeys(label for one in ranks for label in one.calls)
    for label in labels:
        calls = {one.stand.rank: one.calls[label]["calls"] for one in ranks if label in one.calls}
        stands = {one.stand.rank: one.stand for one in ranks}
        for number in sorted({int(n) for own in calls.values() for n in own}):
            told = [(rank, own[str(number)]) for rank, own in calls.items() if str(number) in own]
            called = differing([[_answer(stands[rank], call)] for rank, call in told])
            if called:
                return called, f"{label} {number}"
    return [], ""


def _answer(stand: Stand, call: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: call[key] for key in ("part", "op", "place", "odd")}
    return {"says": call["says"], **vars(replace(stand, state="called", **told))}
