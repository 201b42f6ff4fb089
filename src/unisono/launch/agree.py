"""What all ranks must hold alike, compared before anything is built. No torch: words in the store that they met over.

Where ranks were started by others, each has read its own command line, files and environment. One that differs would
not fail: it would train something else, or leave the others in a collective. So each puts down one line, rank 0
compares them, and what it finds is raised on every rank, naming the odd one.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from unisono.launch import error_record
from unisono.launch.context import RankContext
from unisono.launch.run.verdict import listed
from unisono.spec.errors import UnisonoError, UsageError

T = TypeVar("T")
Facts = Mapping[str, Any]

_LIKELY = {
    "data": "the file on that host is another one, or its Python brings another standard library",
    "checkpoint": "the run folder of that host is another one: all hosts need to see the same",
    "backend": "that host has fewer GPUs than ranks, or launch.backend is set there",
    "device": "that host has other devices; sync=canonical promises the same bits only on one kind",
    "threads": "that host has other cores; sums on a CPU depend on the number of threads",
}
_FIX = {
    "threads": "the same launch.threads_per_rank everywhere, or sync=every_step",
    "device": "ranks on one kind of device, or sync=every_step",
    "backend": "launch.backend = gloo or nccl, the same everywhere",
}


def agree(
    ctx: RankContext, topic: str, work: Callable[[], T], facts: Callable[[T], Facts] = lambda _: {}
) -> T:
    """Do `work` on every rank; go on only if it succeeded on all and came to the same `facts`.

        corpus = agree(ctx, "data", read, lambda corpus: {"data": corpus.fingerprint})

    topic: used once a run. Every rank of the run calls it, or it hangs. Raises on every rank the error of the lowest
    rank whose work failed; else UsageError L05, which names the rank whose facts differ.
    """
    result, failure, line = None, None, {}
    try:
        result = work()
        line["facts"] = facts(result)
    except Exception as error:  # told to all below
        failure, line["error"] = error, error_record.describe(error)
    ctx.store.set(f"{topic}/{ctx.rank}", json.dumps({"host": ctx.host, **line}))
    verdict = tell(ctx, topic, lambda: _judged([_line(ctx, topic, rank) for rank in range(ctx.world)]))
    if failure is not None and not isinstance(failure, UnisonoError):
        raise failure  # with its traceback, on the rank that has it
    if verdict is not None:
        raise _shared(verdict)
    return result  # type: ignore[return-value]


def tell(ctx: RankContext, topic: str, work: Callable[[], T]) -> T:
    """Rank 0's word for all: it alone does `work`, every rank returns what came of it, which must be JSON values.

    Every rank of the run calls it, or it hangs. An error of `work` is raised on every rank.
    """
    if ctx.rank == 0:
        try:
            word = {"value": work()}
        except Exception as error:  # told to all below
            word = {"error": {**error_record.describe(error), "rank": 0, "host": ctx.host}}
        ctx.store.set(topic, json.dumps(word))
    word = json.loads(ctx.store.get(topic))
    if "error" in word:
        raise _shared(word["error"])
    return word["value"]


def _line(ctx: RankContext, topic: str, rank: int) -> dict[str, Any]:
    return json.loads(ctx.store.get(f"{topic}/{rank}"))


def _judged(lines: Sequence[Mapping[str, Any]]) -> error_record.Record | None:
    for rank, line in enumerate(lines):
        if "error" in line:
            return {**line["error"], "rank": rank, "host": line["host"]}
    error = odd_one([line["facts"] for line in lines], [line["host"] for line in lines])
    return None if error is None else {**error_record.describe(error), "rank": error.rank, "host": error.host}


def _shared(record: error_record.Record) -> Exception:
    error = error_record.revive(record, record["rank"], record["host"])
    error.shared = True
    return error


def odd_one(facts: Sequence[Facts], hosts: Sequence[str]) -> UsageError | None:
    """The error for the first fact in which ranks differ, None if they differ in none.

    What most ranks hold is right, on a tie what rank 0 holds. facts, hosts: one a rank.
    """
    keys = dict.fromkeys(key for line in facts for key in line)
    for key in keys:
        values = [json.dumps(line.get(key), sort_keys=True) for line in facts]
        if len(set(values)) == 1:
            continue
        counts = Counter(values)
        most = max(counts.values())
        right = values[0] if counts[values[0]] == most else counts.most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != right]
        also = f"; so do {listed(odd[1:])}" if odd[1:] else ""
        return UsageError(
            f"ranks differ: {key} is {_plain(values[odd[0]])}, the others have {_plain(right)}",
            where=f"before the first step, {listed(odd)} of {len(facts)}",
            likely=_LIKELY.get(key, "it was started with another command, file or environment") + also,
            fix=_FIX.get(key, "the same command, files and versions for all ranks"),
            rank=odd[0],
            host=hosts[odd[0]],
            code="L05",
        )
    return None


def _plain(value: str, most: int = 80) -> str:
    text = value.strip('"')
    return text if len(text) <= most else text[: most - 3] + "..."
