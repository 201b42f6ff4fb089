"""All runs below a folder: what each was made of, how far it is, and which came from which. No torch.

What a run was made of stands in its own folder: the plan in `config.resolved.toml`, the code's commit in `env.json`,
the data's fingerprint in `history.jsonl` or else in a checkpoint, the parent in `parent.json` or where the recipe takes
weights of another run.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.observe.files import lock_now
from unisono.observe.metrics import read_steps
from unisono.spec.doubtful import TEXT, read_regular, read_text, toml_of
from unisono.spec.errors import UsageError
from unisono.spec.runs import CHECKPOINTS, CONFIG, HISTORY, PARENT, newest_saved, run_around
from unisono.spec.words import is_number

STATES = ("running", "done", "stopped", "failed", "lost")
_LARGEST = 16 << 20  # bytes of a file that a run writes once
_BOUND = re.compile(r"([A-Za-z_][\w.]*)\s*(<=|>=|<|>)\s*([-+.\deE]+)")
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b, ">": lambda a, b: a > b, "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run. state: running (its folder is locked), done, stopped (it ended before its last step), failed, or lost
    (it began and nobody knows how it ended). step: the last one made, of `steps`. metrics: numbers of its end, by name.
    data: the fingerprint of its data. commit: of the folder in which it was started last; changed: whether files
    there differed from it. parent: (run, checkpoint) whose weights it began with; the checkpoint
    is "" where the recipe does not name it. nbytes: of all its files. began: Unix time of its first start."""

    folder: Path
    name: str
    plan: str
    state: str
    step: int
    steps: int
    metrics: Mapping[str, float]
    data: str
    commit: str
    changed: bool
    parent: tuple[str, str] | None
    nbytes: int
    began: float

    def as_json(self) -> dict[str, Any]:
        """The object of `runs --json`."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            **values, "folder": str(self.folder), "metrics": dict(self.metrics),
            "parent": None if self.parent is None else {"run": self.parent[0], "checkpoint": self.parent[1]},
        }  # fmt: skip


def entries(folder: Path) -> list[RunEntry]:
    """Every run in a folder or below it, by the time of its beginning. Raises UsageError C03 for what is no folder."""
    if not folder.is_dir():
        raise UsageError(
            f"no such folder: {folder}", where=str(folder), fix="unisono runs FOLDER", code="C03"
        )
    return sorted(map(entry, _folders(folder)), key=lambda run: (run.began, str(run.folder)))


def _folders(folder: Path) -> Iterator[Path]:
    """Run folders; what lies inside one is its own."""
    if (folder / CONFIG).is_file():
        yield folder
        return
    for below in sorted(folder.iterdir()):
        if below.is_dir() and not below.is_symlink() and not below.name.startswith("."):
            yield from _folders(below)


def entry(folder: Path) -> RunEntry:
    """What a run's folder tells. Never raises for what is absent or damaged."""
    config, summary, environment = (
        toml_of_run(folder / CONFIG),
        json_of(folder / "summary.json"),
        json_of(folder / "env.json"),
    )
    history = history_of(folder)
    commits = (line["git"] for line in reversed(history) if isinstance(line.get("git"), dict))
    git = next(commits, environment.get("git")) or {}
    metrics, step = _metrics(folder, summary)
    train = config.get("train", {})
    steps = train.get("steps", 0) if isinstance(train, dict) else 0
    facts = (str(line["data"]) for line in reversed(history) if line.get("data"))
    return RunEntry(
        folder=folder,
        name=str(config.get("name", folder.parent.name)),
        plan=str(config.get("plan", "")),
        state=state_of(folder, history, step, steps),
        step=step,
        steps=steps,
        metrics=metrics,
        data=next(facts, "") or _data_of(folder),
        commit=str(git.get("commit", "")),
        changed=bool(git.get("changed")),
        parent=parent_of(folder, config),
        nbytes=sum(
            path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
        ),
        began=min((float(line["at"]) for line in history), default=folder.stat().st_mtime),
    )


def parent_of(folder: Path, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(run, checkpoint) from which a run has its first weights, or what teaches it."""
    if parent := json_of(folder / PARENT):
        return str(parent.get("run", "")), str(parent.get("checkpoint", ""))
    texts = [value for key in ("model", "train") for value in dict(config.get(key, {})).values()]
    for text in texts:
        if isinstance(text, str) and ("/" in text or os.sep in text):
            path = Path(text.partition(":")[2] or text)
            path = newest_saved(path, folder.name) or path
            if path.exists() and (run := run_around(path / CONFIG)) is not None and run != folder.absolute():
                name = path.name if path.parent.name == CHECKPOINTS else ""
                return os.path.relpath(run), name
    return None


def is_locked(folder: Path) -> bool:
    """Whether a process trains in this folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return not lock_now(handle)
    finally:
        os.close(handle)


def state_of(folder: Path, history: Sequence[Mapping[str, Any]], step: int, steps: int) -> str:
    if is_locked(folder):
        return "running"
    if (folder / "error.json").is_file():
        return "stopped" if json_of(folder / "error.json").get("exit") in (75, 130) else "failed"
    last = next((line for line in reversed(history) if line["event"] in ("start", "end")), {"event": ""})
    if last["event"] == "start":
        return "lost"
    return "done" if step >= steps or last.get("early") else "stopped"


def _metrics(folder: Path, summary: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """(numbers by name: the last of each in metrics.jsonl; the last step)."""
    numbers, step = dict[str, float](), int(summary.get("steps") or 0)
    with suppress(OSError):
        records, _ = read_steps(folder / "metrics.jsonl")
        for record in records:
            numbers |= {
                key: float(value) for key, value in record.items() if key != "step" and is_number(value)
            }
            step = max(step, record["step"] if isinstance(record.get("step"), int) else 0)
    if (value := summary.get("val_loss")) is not None and is_number(value):
        numbers["val_loss"] = float(value)
    return numbers, step


def _data_of(folder: Path) -> str:
    """The fingerprint that the newest checkpoint has, of a run whose history has none."""
    for manifest in sorted(folder.glob(f"{CHECKPOINTS}/step-*/manifest.json"), reverse=True):
        state = json_of(manifest).get("state")
        if isinstance(state, dict) and isinstance(state.get("data"), dict):
            return str(state["data"].get("fingerprint", ""))
    return ""


def history_of(folder: Path) -> list[dict[str, Any]]:
    lines = []
    with suppress(OSError, ValueError):
        for text in read_text(folder / HISTORY, _LARGEST).splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and "event" in line and is_number(line.get("at")):
                    lines.append(line)
    return lines


def json_of(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(read_regular(path, _LARGEST) or b"null")
        return value if isinstance(value, dict) else {}
    return {}


def toml_of_run(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        return toml_of(read_text(path, TEXT))
    return {}


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are meant; what is "" or empty says nothing. plan: words that the plan has, `dp=2 tp=2`. parent: a run
    that it came from. bounds: (metric, comparison, number)."""

    name: str = ""
    plan: str = ""
    states: tuple[str, ...] = ()
    parent: str = ""
    commit: str = ""
    data: str = ""
    bounds: tuple[tuple[str, str, float], ...] = ()

    def __call__(self, run: RunEntry) -> bool:
        """Whether a run is meant."""
        wanted = (
            not self.name or re.fullmatch(self.name.replace(".", r"\.").replace("*", ".*"), run.name),
            {*self.plan.split()} <= {*run.plan.split()},
            not self.states or run.state in self.states,
            not self.parent
            or (run.parent is not None and Path(run.parent[0]).name == Path(self.parent).name),
            run.commit.startswith(self.commit),
            run.data.startswith(self.data),
        )
        return all(wanted) and all(
            key in run.metrics and _COMPARED[sign](run.metrics[key], bound)
            for key, sign, bound in self.bounds
        )


def bound(text: str) -> tuple[str, str, float]:
    """Reads `val_loss<1.5`. Raises UsageError C04."""
    match = _BOUND.fullmatch(text.strip())
    try:
        if match is not None:
            return match[1], match[2], float(match[3])
    except ValueError:
        pass
    raise UsageError(f"{text!r} compares no metric with a number", where="--metric", fix='--metric "val_loss<1.5"',
                     code="C04")  # fmt: skip


def parents(runs: Sequence[RunEntry]) -> dict[str, list[RunEntry]]:
    """Runs that began with weights of another, by the name of that one's folder, which no two runs share."""
    known: dict[str, list[RunEntry]] = {}
    for run in runs:
        if run.parent is not None:
            known.setdefault(Path(run.parent[0]).name, []).append(run)
    return known
