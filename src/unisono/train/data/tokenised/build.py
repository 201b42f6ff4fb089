"""Gives parts of the data to worker processes, and puts together what they made.

Parts do not depend on the number of workers, so neither do the tokens. Workers are processes of their own rather than
forks: they may be started where threads are, and whatever threads they start end with them.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.spec.errors import UsageError
from unisono.train.data import cache
from unisono.train.data.tokenised.cutters import folder_of, width_of
from unisono.train.data.tokenised.order import DATASET, JSONL, PARQUET, PLAIN, Part, TokenOrder
from unisono.train.data.worker_pool import on_stderr, progress, served, working

FORMAT = 2  # of what lies in the cache, and of how texts are cut
_PART = 4 << 20  # bytes of a file that one worker takes at a time
_REMARKS = 8  # that are told of records
_MOST = 64  # workers, whatever the number of cores
_WORKER = "unisono.train.data.tokenised.worker"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tokens:
    """tokens: [n], memory-mapped. ends: int64, behind each document. marks: uint8 [n], 1 for a token that counts as a
    target; None where all do. vocab: how many different tokens there can be. letters: of `char`, its vocabulary.
    notes: what a user may not expect of some records, a line each."""

    tokens: np.ndarray
    ends: np.ndarray
    marks: np.ndarray | None
    vocab: int
    letters: str
    left_out: int
    folder: Path
    notes: tuple[str, ...] = ()


def tokenised(
    order: TokenOrder, places: Sequence[str], cached: str, workers: int | None = None, say: Say | None = None
) -> Tokens:
    """The tokens of all records of these places, in order, from the cache if they were made before.

    workers: processes; one a core this process may use where None. say: of progress; on stderr where None.
    Raises UsageError, codes D02, D03, D04, D06, D10, D11, D14 (a bad record), D15 (the cache cannot be written).
    """
    say, folder = say or on_stderr, folder_of(order.tokenizer)
    looked = _looked(order, places) if order.kind == DATASET else None
    identities = (
        [list(part) for part in looked]
        if looked is not None
        else [cache.identity(Path(place)) for place in places]
    )
    key = {
        "format": FORMAT,
        "order": order.as_json(),
        "tokenizer": folder and folder.digest,
        "data": identities,
    }
    key["order"].pop("tokenizer" if folder else "split")  # its place says nothing

    def make(out: Path) -> Mapping[str, Any]:
        looks = looked if looked is not None else _looked(order, places)
        parts = [Part(*look[:4]) for look in looks]
        count = min(workers or len(os.sched_getaffinity(0)), _MOST, max(1, len(parts)))
        return _make(order, parts, out, count, say)

    at, meta = cache.kept(
        cached, "tokens", key, make, lambda: say("another process is tokenising this data: waiting\n")
    )
    tokens = (
        np.memmap(at / "tokens", dtype=meta["dtype"], mode="r")
        if meta["tokens"]
        else np.zeros(0, meta["dtype"])
    )
    marks = np.memmap(at / "marks", dtype=np.uint8, mode="r") if meta["masked"] else None
    ends = np.fromfile(at / "ends", dtype=np.int64)
    return Tokens(
        tokens, ends, marks, meta["vocab"], meta["letters"], meta["left_out"], at, tuple(meta["told"])
    )


def _looked(order: TokenOrder, places: Sequence[str]) -> list[Sequence[Any]]:
    """(place, start, stop, size, identity) of every part."""
    if order.kind in (PARQUET, DATASET):
        with working(_WORKER, 1) as (worker,):
            worker.ask({"look": list(places), "order": order.as_json()})
            while not (heard := worker.heard("")):
                pass
            return heard[0]["parts"]
    parts = []
    for place in places:
        size = Path(place).stat().st_size
        step = _PART if order.kind == JSONL else max(size, 1)  # a plain file is one document
        parts += [
            (place, start, min(start + step, size), min(step, size - start)) for start in range(0, size, step)
        ]
    return parts


def _make(order: TokenOrder, parts: Sequence[Part], out: Path, count: int, say: Say) -> Mapping[str, Any]:
    begun, request = time.monotonic(), {"order": order.as_json()}
    answers: dict[int, Mapping[str, Any]] = {}
    done, total = dict.fromkeys(range(len(parts)), 0), sum(part.size for part in parts)

    def heard(at: int, answer: Mapping[str, Any]) -> bool:
        part = parts[at]
        if "done" in answer:
            done[at] = min(answer["done"], part.size)
            say(_line(done, total, order, begun))
            return False
        if answer["bad"] and not order.skip_bad:
            raise bad_record(order, part, *answer["bad"][0])
        answers[at], done[at] = answer, part.size
        return True

    jobs = [
        {**request, "part": [part.place, part.start, part.stop, part.size], "out": str(out / str(i))}
        for i, part in enumerate(parts)
    ]
    served(_WORKER, count, jobs, str(out), heard)
    say(_line(done, total, order, begun) + "\n")
    return _together(order, parts, answers, out, say)


def _together(
    order: TokenOrder, parts: Sequence[Part], answers: Mapping[int, Mapping[str, Any]], out: Path, say: Say
) -> Mapping[str, Any]:
    numbers, masked = range(len(parts)), any(answer["masked"] for answer in answers.values())
    ends, total = [], 0
    for i in numbers:
        ends.append(np.fromfile(out / f"{i}.ends", dtype=np.int64) + total)
        total += answers[i]["tokens"]
        (out / f"{i}.ends").unlink()
    np.concatenate(ends or [np.zeros(0, np.int64)]).tofile(out / "ends")
    for name, wanted in (("tokens", True), ("marks", masked)):
        files = [out / f"{i}.{name}" for i in numbers]
        if wanted:
            cache.joined(files, out / name)
        for file in files:
            file.unlink(missing_ok=True)
    left_out = sum(answer["left_out"] for answer in answers.values())
    for i in numbers if left_out else ():
        for at, why in answers[i]["bad"]:
            say(f"left out {place_of(order, parts[i], at)}: {why}\n")
    letters, folder, dtype = "", folder_of(order.tokenizer), width_of(order.tokenizer)
    if order.tokenizer == "char":
        letters, dtype = _numbered(out / "tokens")
    vocab = folder.vocab if folder else len(letters) or 256
    return {
        "dtype": dtype, "tokens": total, "documents": sum(map(len, ends)), "masked": masked, "vocab": vocab,
        "letters": letters, "left_out": left_out, "told": _notes_of(order, parts, answers),
    }  # fmt: skip


def _notes_of(
    order: TokenOrder, parts: Sequence[Part], answers: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    """Each remark on records once: of how many, and where the first of them stands."""
    remarks: dict[str, list[int]] = {}
    for i in range(len(parts)):
        for remark, (count, at) in answers[i]["told"].items():
            remarks.setdefault(remark, [0, i, at])[0] += count
    lines = [
        f"{remark}: {count:,} record{'s' * (count != 1)}, the first {place_of(order, parts[i], at)}"
        for remark, (count, i, at) in remarks.items()
    ]
    return [
        *lines[:_REMARKS],
        *([f"and {len(lines) - _REMARKS} remarks more"] if len(lines) > _REMARKS else []),
    ]


def _numbered(path: Path) -> tuple[str, str]:
    """Code points on disk become numbers of those that occur: (these, the type of the numbers)."""
    codes = np.fromfile(path, dtype=np.uint32)
    present, numbers = np.unique(codes, return_inverse=True)
    dtype = "u1" if len(present) <= 256 else "u4"
    numbers.astype(dtype).tofile(path)
    return "".join(map(chr, present)), dtype


def place_of(order: TokenOrder, part: Part, at: int) -> str:
    """The place of a record, for messages: a line of a file, a row of a table."""
    if order.kind == JSONL:
        with open(part.place, "rb") as file:
            line, left = 1, at
            while left and (read := file.read(min(left, 1 << 20))):
                line, left = line + read.count(b"\n"), left - len(read)
        return f"{part.place}:{line}"
    return f"{part.place}, row {at}" if order.kind in (PARQUET, DATASET) else part.place


def bad_record(order: TokenOrder, part: Part, at: int, why: str) -> UsageError:
    """The error for a record that cannot be read."""
    if order.kind == PLAIN:
        return UsageError(why, code="D06", where=part.place, fix="files that hold UTF-8 text alone")
    return UsageError(
        f"a bad record: {why}",
        code="D14",
        where=place_of(order, part, at),
        fix="mend the record, or data.skip_bad = true, which leaves such out and counts them",
    )


def _line(done: Mapping[int, int], total: int, order: TokenOrder, begun: float) -> str:
    unit = "rows" if order.kind == DATASET else "bytes"
    return progress(
        f"tokenising ({order.tokenizer})", sum(done.values()), total, unit, time.monotonic() - begun
    )
