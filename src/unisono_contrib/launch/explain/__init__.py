"""`unisono doctor explain LOG`: what ended a run, by its logs. The patterns are data (`known`). No torch.

facts, lines = run("slurm-812.out")
facts["cause"]["pattern"]    # "gpu-out-of-memory"
"""

import json
from pathlib import Path
from typing import IO, Any

from unisono.spec.doubtful import visible
from unisono_contrib.launch.explain.cause import Explanation, explain
from unisono_contrib.launch.explain.evidence import LogFinding, look
from unisono_contrib.launch.explain.logs import LogFile, log_of, read_logs

_SHOWN = 6  # consequences
_WIDEST = 200  # letters of a line that is shown


def run(where: str, stdin: IO[bytes] | None = None) -> tuple[dict[str, Any], list[str]]:
    """(the object of `--json`, lines for people) for a file, a folder or `-`. Raises UsageError E02."""
    logs = [_unfolded(log) for log in read_logs(where, stdin)]
    explanation = explain([look(log) for log in logs])
    return _facts(where, logs, explanation), _lines(where, logs, explanation)


def _unfolded(log: LogFile) -> LogFile:
    """What a run of ours writes, as it stood on the screen: its error, what its ranks printed; others as they are."""
    unfold = {"error.json": _error, "log.jsonl": _printed}.get(Path(log.name).name)
    try:
        return log_of(log.name, unfold(log)) if unfold else log
    except (ValueError, KeyError, TypeError):
        return log


def _error(log: LogFile) -> str:
    """The block that an error is printed as, below its traceback."""
    error = json.loads(log.text)
    head = f"error {error['code']}  {error['what']}"
    head += f", rank {error['rank']}" if error.get("rank") is not None else ""
    head += f", host {error['host']}" if error.get("host") else ""
    rows = [f"  {key:<7} {error[key]}" for key in ("where", "likely", "try") if error.get(key)]
    return "\n".join([str(error.get("traceback") or ""), head, *rows])


def _printed(log: LogFile) -> str:
    """A line for each line, after the rank that printed it."""
    lines = [json.loads(line.text) for line in log.lines]
    ranks = (f"[rank{line['rank']}]: " if line["rank"] >= 0 else "" for line in lines)
    return "\n".join(rank + line["text"].replace("\n", " ") for rank, line in zip(ranks, lines, strict=True))


def _facts(where: str, logs: list[LogFile], explanation: Explanation) -> dict[str, Any]:
    root, last = explanation.root, explanation.last
    failed = bool(root or last or explanation.others)
    return {
        "schema_version": 1,
        "ok": not failed,
        "log": where,
        "files": len(logs),
        "lines": sum(len(log.lines) for log in logs),
        "cause": _fact(root) if root else None,
        "after": [_fact(finding) for finding in explanation.others],
        "passed": [_fact(finding) for finding in explanation.passed],
        "last_error": dict(zip(("file", "line", "text"), last, strict=True)) if last else None,
    }


def _fact(finding: LogFinding) -> dict[str, Any]:
    return {
        "pattern": finding.name,
        "kind": finding.kind,
        "what": finding.says,
        "likely": finding.likely,
        "try": list(finding.tries),
        "rank": finding.rank,
        "host": finding.host,
        "step": finding.step,
        "evidence": {"file": finding.log.name, "line": finding.line.number, "text": finding.line.text},
    }


def _lines(where: str, logs: list[LogFile], explanation: Explanation) -> list[str]:
    root, last = explanation.root, explanation.last
    lines = list[str]()
    if root:
        who = [f"rank {root.rank}"] if root.rank is not None else []
        who += [f"host {root.host}"] if root.host else []
        who += [f"step {root.step}"] if root.step is not None else []
        lines.append(f"cause     {root.says}" + (f" ({', '.join(who)})" if who else ""))
        lines.append(
            f"evidence  {_place(root.log.name, root.line.number)}  {root.line.text.strip()[:_WIDEST]}"
        )
        lines.append(f"likely    {root.likely}")
        lines += [f"{'try' if not number else '':<9} {text}" for number, text in enumerate(root.tries)]
        lines.append(f"pattern   {root.name}")
    elif explanation.others:
        lines.append("cause     not in these logs: they show only that another process had ended")
        lines.append("try       the logs of the other ranks and hosts, in one folder")
    elif last:
        lines.append("cause     no known pattern")
        lines.append(f"last error  {_place(last[0], last[1])}  {last[2].strip()[:_WIDEST]}")
        lines.append("try       the lines above it; the logs of the other ranks and hosts, in one folder")
    else:
        count = sum(len(log.lines) for log in logs)
        lines.append(f"no failure is seen in {count} lines of {where}")
    for finding in explanation.others[:_SHOWN]:
        head = "after it" if root else "seen"
        lines.append(f"{head:<9} {finding.says} ({_place(finding.log.name, finding.line.number)})")
    lines += [
        f"went on   after: {finding.says} ({_place(finding.log.name, finding.line.number)})"
        for finding in explanation.passed[:_SHOWN]
    ]
    lines += [
        f"note      {log.name}: {log.left_out} bytes in the middle were not read, nor are lines of them counted"
        for log in logs
        if log.left_out
    ]
    return [visible(line) for line in lines]


def _place(name: str, number: int) -> str:
    return f"{name}:{number}"
