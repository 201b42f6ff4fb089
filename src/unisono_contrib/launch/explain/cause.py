"""The root cause among what logs show: the earliest cause, not the loudest consequence. No torch."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono_contrib.launch.explain.evidence import LogEvidence, LogFinding
from unisono_contrib.launch.explain.known import KINDS

_LONG_BEFORE = 30.0  # seconds by which a time-out is no consequence of what comes then
_NEAR = 6  # lines
_ROOT = "Root Cause (first observed failure)"
_RANK = re.compile(r"\brank +: (\d+)")
_HOST = re.compile(r"\bhost +: (\S+)")
_WORK = re.compile(
    r"\[(?:PG [^\]]*)?Rank (\d+)\].*WorkNCCL\((?:SeqNum|OpID)=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?"
)
_QUEUE = re.compile(
    r"(?:\[rank(\d+)\]|\bRank (\d+)\]).*last enqueued (?:\w+ )?work: (-?\d+), last completed (?:\w+ )?work: (-?\d+)"
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """root: None where no pattern is known. others: consequences, one for each pattern. last: (name of the log, number,
    text) of the last line that speaks of an error. passed: what would be a cause, had no steps come after it."""

    root: LogFinding | None
    others: tuple[LogFinding, ...]
    last: tuple[str, int, str] | None
    passed: tuple[LogFinding, ...] = ()


def explain(logs: Sequence[LogEvidence]) -> Explanation:
    """What ended the run whose logs these are."""
    fatal = [finding for log in logs for finding in log.fatal()]
    names = {finding.name for finding in fatal}
    fatal = [finding for finding in fatal if not finding.explains or names & set(finding.explains)]
    order = _order(logs, fatal)
    fatal.sort(key=lambda each: order[id(each)])
    speaking = [(log.log.name, log.last_error.number, log.last_error.text) for log in logs if log.last_error]
    last = speaking[-1] if speaking else None
    known = [finding for finding in fatal if finding.kind != "echo"]
    if not known:
        ended = {id(finding) for finding in fatal}
        past = [
            each for log in logs for each in log.findings if id(each) not in ended and each.kind in KINDS[:2]
        ]
        return Explanation(None, tuple(_first_of_each(fatal)), last, tuple(_first_of_each(past)))
    root = _clearest(_root(known), known)
    others = [finding for finding in _first_of_each(fatal) if finding.name != root.name]
    return Explanation(_refined(root, logs), tuple(others), last)


def _order(logs: Sequence[LogEvidence], fatal: Sequence[LogFinding]) -> dict[int, tuple[float, int, int]]:
    """By time where all lines have one; else by log and line."""
    places = {id(log.log): place for place, log in enumerate(logs)}
    timed = len(logs) > 1 and all(finding.line.at is not None for finding in fatal)
    return {
        id(finding): (
            (finding.line.at or 0.0) if timed else 0.0,
            places[id(finding.log)],
            finding.line.number,
        )
        for finding in fatal
    }


def _root(known: Sequence[LogFinding]) -> LogFinding:
    """The first of the lightest, unless something that cannot come of it was long before."""
    root = min(known, key=lambda each: (not each.explains, each.weight))
    for early in known:
        if early is root:
            break
        raised_before = early.name == "exception" and early.rank is not None and early.rank == root.rank
        timed = early.line.at is not None and root.line.at is not None
        waited_before = (
            early.kind == "stall" and timed and (root.line.at or 0) - (early.line.at or 0) > _LONG_BEFORE
        )
        if early.log is root.log and (raised_before or waited_before):
            return early
    return root


def _clearest(root: LogFinding, known: Sequence[LogFinding]) -> LogFinding:
    """Of the same failure on the lines that follow, the one that says most."""
    same = [
        finding
        for finding in known
        if (finding.name, finding.rank) == (root.name, root.rank)
        and finding.log is root.log
        and 0 <= finding.line.number - root.line.number <= _NEAR
    ]
    return max(same, key=lambda each: len(each.says))


def _first_of_each(findings: Sequence[LogFinding]) -> list[LogFinding]:
    names = dict[str, LogFinding]()
    for finding in findings:
        names.setdefault(finding.name, finding)
    return list(names.values())


def _refined(root: LogFinding, logs: Sequence[LogEvidence]) -> LogFinding:
    """With the rank that others waited for, or that the launcher saw fail first."""
    if root.name == "collective-timeout" and (more := _who_is_late(logs)):
        return replace(root, **more)
    if root.rank is not None:
        return root
    for log in logs:
        at = next((line.number for line in log.log.lines if _ROOT in line.text), 0)
        block = "\n".join(line.text for line in log.log.lines[at : at + 8]) if at else ""
        if rank := _RANK.search(block):
            host = _HOST.search(block)
            return replace(root, rank=int(rank[1]), host=host[1] if host else root.host)
    return root


def _who_is_late(logs: Sequence[LogEvidence]) -> dict[str, object]:
    """The rank for which the others waited in a collective, by what the watchdogs of torch print."""
    lines = [line for log in logs for line in log.log.lines]
    works, queues = dict[int, tuple[int, str, str]](), dict[int, int]()
    for line in lines:
        if work := _WORK.search(line.text):
            works.setdefault(int(work[1]), (int(work[2]), work[3], work[4] or ""))
        if queue := _QUEUE.search(line.text):
            queues.setdefault(int(queue[1] or queue[2]), int(queue[3]))
    calls = Counter(works.values())
    (usual, _), *_ = calls.most_common(1) or [((0, "", ""), 0)]
    odd = sorted(rank for rank, call in works.items() if call[0] == usual[0] and call != usual)
    if odd and 2 * len(odd) <= len(works):
        return _mismatch(odd[0], works[odd[0]], usual)
    behind = min(queues, key=lambda rank: queues[rank], default=None)
    if behind is not None and queues[behind] < max(queues.values()):
        said = f"it had issued {queues[behind]} collectives, others {max(queues.values())}"
        return {"rank": behind, "says": f"ranks waited for rank {behind} until the time-out: {said}"}
    silent = sorted({line.rank for line in lines if line.rank is not None} - set(works) - set(queues))
    if works and len(silent) == 1:
        says = f"ranks waited for rank {silent[0]} in a collective ({usual[1]}, number {usual[0]}) until the time-out"
        return {"rank": silent[0], "says": says}
    return {}


def _mismatch(rank: int, call: tuple[int, str, str], usual: tuple[int, str, str]) -> dict[str, object]:
    """What is said of a rank that called something else; a call is (number, operation, numbers in it)."""
    odd, others = (f"{op} of {size} numbers" if size else op for _, op, size in (call, usual))
    return {
        "name": "collective-mismatch",
        "rank": rank,
        "says": f"rank {rank} called {odd} where the others called {others}",
        "likely": "a branch that this rank takes and others do not, or other shapes on it",
        "tries": (
            "the same calls in the same order on all ranks; TORCH_DISTRIBUTED_DEBUG=DETAIL names both sides",
        ),
    }
