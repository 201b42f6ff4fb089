"""Read a run folder, whatever is left of it: what is absent or damaged is named, never fatal."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from unisono.observe.metrics import read_lines, read_steps
from unisono.observe.trace import Trace
from unisono.observe.trace import read as read_trace
from unisono.spec.doubtful import TEXT, read_text, toml_of
from unisono.spec.runs import BEST, CHECKPOINTS, HISTORY
from unisono.spec.source import counted_in
from unisono.spec.words import is_number

Record = dict[str, Any]
T = TypeVar("T")
_LARGEST = 64 << 20  # bytes of an object that a run writes once


@dataclass(frozen=True)
class RankFacts:
    """What one rank wrote since the run was last started or resumed: its place, and per step `time` (seconds), `bytes`
    and `mem_mib`. What an earlier plan took would be no measure of this one."""

    rank: int
    host: str = ""
    coords: dict[str, int] = field(default_factory=dict)
    steps: tuple[Record, ...] = ()

    @property
    def place(self) -> str:
        """Where it sits in the mesh, axes of one left out: `dp=1 pp=0`."""
        return " ".join(f"{axis}={at}" for axis, at in self.coords.items())


@dataclass(frozen=True)
class RunRecord:
    """A run folder as plain values; `missing` says in sentences what could not be read."""

    folder: Path
    steps: tuple[Record, ...] = ()
    ranks: tuple[RankFacts, ...] = ()
    traces: tuple[Trace, ...] = ()
    config_text: str = ""
    config: Record = field(default_factory=dict)
    environment: Record = field(default_factory=dict)
    summary: Record = field(default_factory=dict)
    error: Record = field(default_factory=dict)
    prediction: Record = field(default_factory=dict)
    history: tuple[Record, ...] = ()
    best: int | None = None  # the step of the checkpoint that `[early_stopping]` keeps as the best
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.summary.get("name") or self.folder.parent.name or "run")

    @property
    def unit(self) -> str:
        """What its speed counts, tokens or samples."""
        data = self.config.get("data")
        return counted_in(str(data.get("source", "")) if isinstance(data, dict) else "")

    @property
    def recent(self) -> Sequence[Record]:
        """The steps since the run was last started or resumed, as far as its ranks tell."""
        first = min((facts.steps[0]["step"] for facts in self.ranks if facts.steps), default=0)
        return [record for record in self.steps if record["step"] >= first] or self.steps

    @property
    def speed(self) -> float | None:
        """Tokens or samples per second since the run was last started or resumed, without the first step; None where
        nothing is known. The mean over time: steps have the same number of tokens, so their seconds are averaged."""
        speeds = [
            r["tokens_per_s"] for r in self.recent[1:] or self.recent if is_number(r.get("tokens_per_s"))
        ]
        taken = [1 / speed for speed in speeds if speed]
        return len(taken) / sum(taken) if taken else None

    @property
    def validation(self) -> list[tuple[float, float]]:
        """(step, loss) of every validation; from the metrics and from the summary's `val`."""
        values = self.summary.get("val")
        pairs = (
            [pair for pair in values if isinstance(pair, list) and len(pair) == 2]
            if isinstance(values, list)
            else []
        )
        pairs += [[record["step"], record.get("val_loss")] for record in self.steps]
        return sorted(
            {float(step): float(loss) for step, loss in pairs if is_number(step) and is_number(loss)}.items()
        )

    @property
    def early(self) -> str:
        """Why the run ended before its last step, as `[early_stopping]` said; "" where it did not."""
        ends = [line for line in self.history if line["event"] in ("start", "end")]
        return str(ends[-1].get("early", "")) if ends else ""

    @property
    def judged_by(self) -> str:
        """The number of a validation by which its checkpoints are judged, `val_loss`."""
        section = self.config.get("early_stopping")
        return str(section.get("metric", "val_loss")) if isinstance(section, dict) else "val_loss"

    @property
    def best_value(self) -> float | None:
        """What the validation of the best checkpoint came to; None where that is not known."""
        values = [r.get(self.judged_by) for r in self.steps if r["step"] == self.best]
        return next((float(value) for value in values if value is not None and is_number(value)), None)

    @property
    def plan(self) -> str:
        return str(self.summary.get("plan") or self.config.get("plan") or "")


def collect(folder: str | Path) -> RunRecord:
    """Everything a run folder holds. Never raises for what is absent, cut short or damaged."""
    root = Path(folder)
    missing: list[str] = []
    steps, ranks = _metrics(root, missing), _ranks(root, missing)
    around = collect_around(root)
    return replace(around, steps=tuple(steps), ranks=tuple(ranks), missing=(*missing, *around.missing))


def collect_around(folder: str | Path) -> RunRecord:
    """The same but for what grows with each step: a run without its steps and ranks, for who follows those himself."""
    root = Path(folder)
    missing: list[str] = []
    config_text = _try(
        lambda: read_text(root / "config.resolved.toml", TEXT), "", "config.resolved.toml", missing
    )
    config = _try(lambda: toml_of(config_text), {}, "config.resolved.toml", missing) if config_text else {}
    environment = _json(root / "env.json", missing)
    optional: list[str] = []
    return RunRecord(
        folder=root,
        traces=tuple(_traces(root, missing)),
        config_text=config_text,
        config=config,
        environment=environment,
        summary=_json(root / "summary.json", optional),
        error=_json(root / "error.json", optional),
        prediction=_json(root / "prediction.json", optional),
        history=tuple(_history(root, optional)),
        best=_best(root, optional),
        missing=tuple(missing + [line for line in optional if "absent" not in line]),
    )


def _metrics(root: Path, missing: list[str]) -> list[Record]:
    records, damaged = _try(lambda: read_steps(root / "metrics.jsonl"), ([], 0), "metrics.jsonl", missing)
    _count_damaged("metrics.jsonl", damaged, missing)
    return _by_step(records)


def _history(root: Path, missing: list[str]) -> list[Record]:
    """What happened to the run, in order of time."""
    records, _ = _try(lambda: read_lines(root / HISTORY), ([], 0), HISTORY, missing)
    return sorted(filter(_is_change, records), key=lambda line: line["at"])


def _best(root: Path, missing: list[str]) -> int | None:
    name = _try(lambda: read_text(root / CHECKPOINTS / BEST, 4096), "", f"{CHECKPOINTS}/{BEST}", missing)
    step = name.strip().rpartition("/step-")[2]
    return int(step) if step.isdecimal() else None


def _is_change(line: Record) -> bool:
    """Whether all that is read of a line of the history is of its kind."""
    numbers = (line.get("at"), line.get("step", 0), line.get("ranks", 1))
    return (
        all(is_number(number) for number in numbers)
        and 0 < numbers[2] < 1 << 16
        and isinstance(line.get("event"), str)
        and isinstance(line.get("lost", {}), dict)
    )


def _ranks(root: Path, missing: list[str]) -> list[RankFacts]:
    ranks, since = [], 0
    for path in _numbered(root / "events", r"rank(\d+)\.jsonl"):
        label = f"events/{path.name}"
        records, damaged = _try(lambda path=path: read_steps(path), ([], 0), label, missing)
        _count_damaged(label, damaged, missing)
        info = [r for r in records if r.get("kind") == "info"]
        steps = _by_step([r for r in records if r.get("kind") == "step" and isinstance(r.get("time"), dict)])
        since = since or _begun(records)
        steps = [step for step in steps if step["step"] >= since]
        ranks.append(rank_facts(_number(path), info[-1] if info else {}, steps))
    ranks = [facts for facts in ranks if facts.steps or not since]  # an earlier plan may have had more ranks
    ranks = in_used_axes(ranks)
    if not ranks:
        missing.append("events/ is absent: nothing is known about single ranks")
    return ranks


def rank_facts(rank: int, place: Record, steps: Sequence[Record]) -> RankFacts:
    """A rank as its line of the kind info places it, with its steps."""
    coords = place.get("coords")
    known = coords.items() if isinstance(coords, dict) else ()
    return RankFacts(
        rank, str(place.get("host", "")), {str(k): int(v) for k, v in known if _is_int(v)}, tuple(steps)
    )


def in_used_axes(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """The ranks without their places on axes of one."""
    used = {axis for facts in ranks for axis, at in facts.coords.items() if at > 0}
    return [replace(facts, coords={a: at for a, at in facts.coords.items() if a in used}) for facts in ranks]


def _begun(records: list[Record]) -> int:
    """The first step after the last start; a start, which a line of the kind info is, may have none yet."""
    first, fresh = 0, True
    for record in records:
        if record.get("kind") == "info":
            fresh = True
        elif fresh and _is_int(record.get("step")):
            first, fresh = record["step"], False
    return first


def _traces(root: Path, missing: list[str]) -> list[Trace]:
    paths = _numbered(root / "trace", r"rank(\d+)\.json\.gz")
    read = [_try(lambda path=path: read_trace(path), None, f"trace/{path.name}", missing) for path in paths]
    if not paths:
        missing.append("trace/ is absent: no timeline can be drawn")
    if any(trace is not None and trace.on_gpu for trace in read):
        missing.append(
            "times on GPUs: forward and backward only hand work over, and the wait for it stands in optim"
        )
        missing.append("bytes that shards send each other on GPUs: FSDP2 sends them there itself")
    return [trace for trace in read if trace is not None and trace.spans]


def _by_step(records: list[Record]) -> list[Record]:
    """In order of steps; a step done again after a restart counts as it was done last."""
    last: dict[int, Record] = {}
    add_steps(last, records)
    return [last[step] for step in sorted(last)]


def add_steps(steps: dict[int, Record], records: Sequence[Record]) -> None:
    """Put lines of steps, in the order in which they were written, with those that are known by their number."""
    for record in records:
        step = record.get("step")
        if isinstance(step, int):
            # A line without a loss or times adds to its step (a validation); any other replaces it.
            adds = "loss" not in record and "time" not in record
            steps[step] = {**steps.get(step, {}), **record} if adds else record


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbered(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if re.fullmatch(pattern, p.name)), key=_number)


def _number(path: Path) -> int:
    return int(re.findall(r"\d+", path.name)[0])


def _json(path: Path, missing: list[str]) -> Record:
    value = _try(lambda: json.loads(read_text(path, _LARGEST)), {}, path.name, missing)
    if isinstance(value, dict):
        return value
    missing.append(f"{path.name} is damaged: it holds no object")
    return {}


def _try(read: Callable[[], T], otherwise: T, name: str, missing: list[str]) -> T:
    try:
        return read()
    except FileNotFoundError:
        missing.append(f"{name} is absent")
    except (OSError, EOFError, ValueError, RecursionError) as error:
        missing.append(f"{name} is damaged: {error}")
    return otherwise


def _count_damaged(name: str, damaged: int, missing: list[str]) -> None:
    if damaged:
        missing.append(f"{name} has {damaged} damaged line{'s' if damaged > 1 else ''}, left out")
