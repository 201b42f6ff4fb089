"""`unisono doctor hang RUN`: ask a run that is alive whether it hangs, from outside, and on whose account. No torch.

The judge is that which ends runs (`verdict.hang`); what differs is that whoever asks has nothing to wait for: it looks
until the ranks have moved, or have kept each other waiting for longer than their own pace explains.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.launch import hang_report, inspect_folder
from unisono.launch.inspect import InspectedRank, look, mismatched
from unisono.launch.inspect_folder import ALIVE
from unisono.launch.rank_status import RankStatus
from unisono.launch.run import verdict
from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.runs import run_folder
from unisono.spec.words import whole
from unisono.train.state.writing import locked

LEAST, TIMES = 5.0, 20
"""Seconds, and usual steps, that ranks may wait for one: a run's own deadline is longer."""
FIRST = 10.0
"""Seconds before the pace is known."""
PATIENCE = 10  # times that, where ranks begin, validate or save, and one still works
_LONG = ("train/step/evaluate.py", "train/state/checkpoint/", "library/job.py")
_STAYS = 20.0  # seconds: for how long we look on


@dataclass(frozen=True)
class Diagnosis:
    """error: the fault that is seen, None if there is none. waited, limit: seconds that ranks have waited, and may.
    again: whether to look again before this is said. mark: what the fault is of, where it has to be seen twice."""

    error: UnisonoError | None
    waited: float = 0.0
    limit: float = 0.0
    again: bool = False
    mark: str = ""


def find(run: str) -> Path:
    """The folder in which the ranks of a run are seen. run: its folder, or the process of a rank of one that has none.
    Raises UsageError C03."""
    folders = inspect_folder.private_runs()
    if (process := whole(run)) is not None and not Path(run).exists():
        for folder in folders:
            if any(seen_process.pid == process for seen_process in inspect_folder.living(folder)):
                return folder
        raise UsageError(
            f"no rank of a run without a folder is process {run}", where="unisono doctor hang",
            fix="the run's folder; unisono doctor hang lists runs of this host without one", code="C03",
        )  # fmt: skip
    folder = Path(run)
    if inspect_folder.living(folder):
        return folder
    return folder / ALIVE if (folder / ALIVE).is_dir() else run_folder(run) / ALIVE


def only_one() -> Path:
    """The one run of this host that has no folder. Raises UsageError where there is another number of them."""
    folders = inspect_folder.private_runs()
    if len(folders) == 1:
        return folders[0]
    pids = [f"{path} (process {inspect_folder.living(path)[0].pid})" for path in folders]
    what = (
        f"which of {len(folders)} runs"
        if folders
        else "name the run: no loop of your own is alive on this host"
    )
    raise UsageError(what, where="unisono doctor hang", likely="; ".join(pids),
                     fix="unisono doctor hang runs/NAME/ID", code="C04")  # fmt: skip


def run(folder: Path, patience: float | None = None) -> tuple[dict[str, Any], list[str]]:
    """Look until it is decided; (the object of `--json`, lines). patience: seconds that ranks may keep others waiting;
    by their pace if None. Raises UsageError O03 for a run that is not alive."""
    begun, mark, last = time.monotonic(), "", None
    while True:
        ranks = inspect_folder.living(folder)
        if not ranks or all(process.has_gone() for process in ranks):
            if last is None or last[1].mark.startswith("gone"):
                raise ended(folder)
            break  # it has ended while we looked: what was seen is what there is to say
        watched = time.monotonic() - begun
        witnesses = look(folder, ranks)
        judged = judge(witnesses, patience, watched)
        last = witnesses, judged
        if not judged.again or (judged.mark and judged.mark == mark):
            break
        mark = judged.mark
        time.sleep(min(1.0, max(0.2, judged.limit - judged.waited)))
    witnesses, judged = last
    return hang_report.report(folder, witnesses, judged.error, judged.waited, judged.limit)


def judge(ranks: Sequence[InspectedRank], patience: float | None, watched: float) -> Diagnosis:
    """What is wrong with ranks that are seen so. watched: seconds since the first look."""
    order = [replace(view.status, state="clashed") if view.clashed else view.status for view in ranks]
    odd = verdict.odd_one_out(order)
    first, waited = odd[0], _waited(ranks, odd[0].state, watched)
    limit = _limit(ranks, first, waited, patience)
    called, number = mismatched(ranks)
    if called:  # ranks answer one after the other: a group may be made anew between
        return Diagnosis(verdict.hang(called, waited), waited, limit, again=True, mark=f"called {number}")
    if first.state in ("clashed", "gone", "stopped"):
        gone = [view.rank for view in odd] if first.state == "gone" else []
        # A moment later it may have been replaced, or the run may have ended.
        mark = f"gone {gone}" if gone else ""
        return Diagnosis(_remedied(order, ranks, waited), waited, limit, again=bool(gone), mark=mark)
    if waited >= limit:
        return Diagnosis(_remedied(order, ranks, waited), waited, limit)
    return Diagnosis(
        None, waited, limit, again=_is_restless(ranks, waited, watched) and limit - waited <= _STAYS
    )


def _waited(ranks: Sequence[InspectedRank], state: str, watched: float) -> float:
    """Seconds for which ranks have waited for the one that is first to blame. state: of that one."""
    waits = [view.status.idle for view in ranks if view.spoke and view.status.state in ("waits", "ended")]
    if state not in ("runs", "silent"):
        return max(waits, default=watched)
    if waits:
        return max(waits)
    if state == "silent":
        return watched
    steps = [view.since / PATIENCE for view in ranks if view.since is not None and view.usual is not None]
    still = min((view.status.idle for view in ranks if view.spoke), default=0.0)  # nobody waits, nobody moves
    return max(still, min(steps, default=0.0))


def _limit(ranks: Sequence[InspectedRank], first: RankStatus, waited: float, patience: float | None) -> float:
    """Seconds that ranks may wait for the one that is first to blame."""
    if patience is not None:
        return patience
    usual = [view.usual for view in ranks if view.usual is not None]
    limit = max(LEAST, TIMES * max(usual)) if usual else FIRST
    spoke = [view for view in ranks if view.spoke]
    long = [
        view.status.rank for view in ranks if any(part in str(f[0]) for f in view.frames for part in _LONG)
    ]
    if first.state != "runs":  # all wait: of those that save together, one may write
        works = len(long) == len(ranks) and any(view.status.idle < waited / 2 for view in spoke)
    else:
        begins = all(view.since is None for view in ranks)
        moves = any(view.status.rank == first.rank for view in spoke) and first.idle < waited / 2
        works = moves and (begins or first.rank in long)
    return limit * PATIENCE if works else limit


def _is_restless(ranks: Sequence[InspectedRank], waited: float, watched: float) -> bool:
    """Whether it may be that somebody stands still; a first look at a run without a pace does not show it."""
    if not all(view.spoke for view in ranks):
        return True
    paces = [(view.since, view.usual) for view in ranks if view.since is not None and view.usual is not None]
    late = any(since > max(2.0, 3 * usual) for since, usual in paces)
    return waited >= 1.0 or late or (not paces and watched < 1.0)


def _remedied(order: Sequence[RankStatus], ranks: Sequence[InspectedRank], waited: float) -> UnisonoError:
    """The judge's error, with what can be done from here."""
    error = verdict.hang(order, waited)
    view = next(view for view in ranks if view.status.rank == error.rank)
    if view.status.state == "stopped" and view.who is not None:
        tracer = view.kernel.get("tracer")
        error.fix = f"kill -CONT {view.who.pid} on {view.who.host}"
        if tracer:
            error.fix = f"let it go in the debugger, process {tracer} on {view.who.host}"
    return error


def ended(folder: Path) -> UsageError:
    """The error for a run that is not alive: when it ended, and how."""
    run, left = folder.parent, inspect_folder.living(folder)
    ends = sorted(
        (path for path in (run / "summary.json", run / "error.json") if path.is_file()),
        key=lambda path: path.stat().st_mtime,
    )
    if _is_held(run):
        how = "a run writes into this folder, and no rank is to be seen: it begins, ends, or is of another version"
    elif not ends and left:
        pids = ", ".join(str(process.pid) for process in left)
        how = f"its processes ({pids}) have gone without a word: they were killed"
    elif not ends:
        how = "it has left no word of its end" if (run / "metrics.jsonl").exists() else "it has not begun"
    else:
        how = f"it ended at {_time(ends[-1])}: {_how(ends[-1])}"
    if not ends and not _is_held(run) and (run / "metrics.jsonl").exists():
        how += f"; its last line is of {_time(run / 'metrics.jsonl')}"
    return UsageError(
        "this run is not alive", where=str(run), likely=how,
        fix=f"unisono report {run}; unisono train --resume {run}", code="O03",
    )  # fmt: skip


def _is_held(run: Path) -> bool:
    """Whether a run writes into its folder, which the kernel knows on this host."""
    try:
        with locked(run, patience=0.0):
            return False
    except UsageError as error:
        return error.code == "O02"


def _how(path: Path) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.name == "summary.json":
            return f"all well, {content['steps']} steps" if not content.get("stopped") else "stopped as asked"
        who = f"rank {content['rank']}, host {content['host']}"
        return f"{content['code']}  {content['what']}, {who}; {content['where']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{path.name} cannot be read"


def _time(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
