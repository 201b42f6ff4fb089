"""What every collective owes: each operation's result as defined, the same bits of a sum everywhere, bytes as declared.

Ranks are threads of this process. What threads cannot have, such as MPI, is judged by `judged` on real ranks.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Algorithm, Collective, Pending, ProgramCollective
from unisono.comm.collectives.engine import Engine
from unisono.comm.tree import tree_sum
from unisono.programs.collectives import OPS, ROOTED
from unisono.programs.collectives.check import check
from unisono.spec.fidelity import Fidelity
from unisono_contrib.comm.thread_group import ThreadGroup
from unisono_contrib.comm.threads import run

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
PARTS = (0, 1, 13, 6_000)
"""Elements of one rank's part: none, one, a prime, and so many that way and bytes are those of a large tensor."""
LARGEST_PROGRAM = 9
_TIMEOUT = 120.0  # seconds, of ranks that another program has started


@dataclass(frozen=True, slots=True)
class OperationCase:
    """Operations on tensors of one dtype whose parts have so many elements."""

    part: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.part} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Judged:
    """One operation on one rank. fault: "" if there is none. bits: of what must be the same on all ranks."""

    name: str
    fault: str = ""
    bits: str = ""


def cases(parts: Sequence[int] = PARTS, dtypes: Sequence[torch.dtype] = DTYPES) -> list[OperationCase]:
    return [OperationCase(part, dtype) for part, dtype in product(parts, dtypes)]


THINNED = (*cases((13, 6_000), DTYPES[:1]), *cases((1,), DTYPES[2:]), OperationCase(0, torch.float32))


def faults(collective: Collective, folder: Path, text: str) -> Iterator[str]:
    """1. Where operations are programs, each is whole for 1 to 9 ranks and every root. 2. On 2, 3 and 6 ranks, or
    others that it serves, every operation gives what it means, for tensors of no, one and many elements, of floats
    and integers; a sum the same bits on all. 3. Sums declared EXACT are those of the tree over the ranks. 4. It
    sends what it declares; what goes through memory, no more."""
    sizes: Sequence[int] = (2, 3, 6)
    if isinstance(collective, ProgramCollective):
        yield from _of_programs(collective)
        served = [size for size in range(2, LARGEST_PROGRAM + 1) if _serves(collective, size)]
        sizes = sorted({size for size in sizes if size in served} or {*served[:3]})
    for size in sizes:
        if collective.threaded:
            yield from on_threads(collective, size, THINNED)
        else:
            yield from _on_started(collective, size, folder / f"ranks{size}", text)


def on_threads(collective: Collective, size: int, operation_cases: Sequence[OperationCase]) -> list[str]:
    """What is wrong with it between so many ranks of this process."""

    def rank_judged(rank: int) -> list[Judged]:
        pg: Any = dist.new_group(list(range(size)), use_local_synchronization=True)
        return judged(collective, pg, operation_cases)

    try:
        return compared(run(size, rank_judged))
    except Exception as error:
        return [f"{size} ranks: {type(error).__name__}: {error}"]


def _on_started(collective: Collective, size: int, file: Path, text: str) -> list[str]:
    """The same between ranks that the collective's own starter starts."""
    command = [
        *collective.starter(size),
        sys.executable,
        "-m",
        f"{__package__}.collective_rank",
        text,
        str(file),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return [f"{size} ranks: not over after {_TIMEOUT} s"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        last = "; ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        return [f"{size} ranks: their program left with {done.returncode}: {last}"]
    return json.loads(lines[-1])


def compared(ranks: Sequence[Sequence[Judged]]) -> list[str]:
    """A sentence for each fault that a rank saw, and for each sum of which one has other bits."""
    faults_seen = []
    for place, (first, *_) in enumerate(zip(*ranks, strict=True)):
        for rank, mine in enumerate(ranks):
            where = f"{len(ranks)} ranks, {first.name}, rank {rank}: "
            if mine[place].fault:
                faults_seen.append(where + mine[place].fault)
            elif mine[place].bits != first.bits:
                faults_seen.append(where + "other bits of the sum than rank 0's")
    return faults_seen


def _serves(collective: ProgramCollective, size: int) -> bool:
    try:
        collective.program("all_reduce", size)
    except ValueError:
        return False
    return True


def _of_programs(collective: ProgramCollective) -> Iterator[str]:
    sizes = [size for size in range(1, LARGEST_PROGRAM + 1) if _serves(collective, size)]
    if not sizes:
        yield f"it serves no number of ranks up to {LARGEST_PROGRAM}"
    for size in sizes:
        for op in OPS:
            for root, pieces in product(range(size) if op in ROOTED else (0,), (1, 3)):
                program = collective.program(op, size, root, pieces)
                words = f"{op} of {size} ranks" + (f" with root {root}" if op in ROOTED else "")
                if (program.op, program.size, program.root) != (op, size, root):
                    yield f"the program for {words} says that it is another"
                yield from (f"{words}: {fault}" for fault in check(program)[:1])


def judged(collective: Collective, pg: Any, operation_cases: Sequence[OperationCase]) -> list[Judged]:
    """Every operation in each of these cases, as this rank sees it. Every member of the group calls it."""
    counter = _Counter(pg, pg.size())
    algorithm = collective.bind(pg, "dp")
    judgements: list[Judged] = []
    for case in operation_cases:
        for attempt in (*_of_all(case, pg, algorithm), *_rooted(case, pg)):
            judgements.append(_tried(attempt, case, algorithm, counter))
    counter.stop()
    return judgements


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An operation to try. x: what its bytes are counted by. acts(): begins it, and gives what will hold the result.
    wanted: the result; None where this rank gets none. only: whether there is only one right result, to the bit."""

    name: str
    op: str
    x: Tensor
    acts: Callable[[Algorithm], tuple[Tensor | None, Pending | None]]
    wanted: Tensor | None
    only: bool = True
    later: bool = False
    root: int = 0


def _tried(attempt: _Attempt, case: OperationCase, algorithm: Algorithm, counter: "_Counter") -> Judged:
    op, x, name = attempt.op, attempt.x, f"{attempt.name} of {case}"
    by = algorithm.pick(op, x, attempt.later)
    before, declared = counter.sent, by.sends(op, x, attempt.root)
    out, pending = attempt.acts(by)
    if pending is not None:
        pending.wait()
        pending.wait()  # as with torch's works, nothing comes of it
    sent, slack = counter.sent - before, 0 if isinstance(by.member, ProgramCollective) else 64 * by.pg.size()
    wanted = attempt.wanted
    if wanted is not None and out is not None:
        only = attempt.only or by.member.fidelity is Fidelity.EXACT or not x.is_floating_point()
        # Of numbers of few digits every order of summation gives the same.
        if not (torch.equal(out, wanted) if only else _near(out, wanted)):
            return Judged(name, "another result than it means")
    # What a backend of its own does with rooted operations nobody sees.
    seen = counter.sees and (op not in ROOTED or isinstance(by.rooted.member, ProgramCollective))
    if seen and (sent > declared + slack or (by.member.counted and sent < declared - slack)):
        return Judged(name, f"it sends {sent} bytes and declares {declared}")
    same = out is not None and op in ("all_reduce", "all_gather")
    return Judged(name, bits=_bits(out) if same and out is not None else "")


def _near(x: Tensor, y: Tensor) -> bool:
    wide = 1e-2 if x.dtype == torch.bfloat16 else 1e-5 if x.dtype == torch.float32 else 1e-12
    return torch.allclose(x.double(), y.double(), rtol=wide, atol=10 * wide)


def _bits(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _digits(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers from -7 to 7, whose sums over ranks every dtype holds."""
    random = torch.Generator().manual_seed(1_000 * numel + rank)
    return torch.randint(-7, 8, (numel,), generator=random).to(dtype)


def _drawn(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on its order, where the dtype has such."""
    if not dtype.is_floating_point:
        return _digits(rank, numel, dtype)
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def _of_all(case: OperationCase, pg: Any, algorithm: Algorithm) -> Iterator[_Attempt]:
    """Operations of which every rank has the result."""
    rank, size, part = pg.rank(), pg.size(), case.part
    total, greatest = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    whole = part * size + (part == 13)  # a prime that the ranks do not divide, for what is not dealt
    digits = [_digits(other, part * size, case.dtype) for other in range(size)]
    drawn = [_drawn(other, whole, case.dtype) for other in range(size)]
    mine, part_of_mine = digits[rank], digits[rank][:part].clone()
    # Of random numbers: near enough, and the same bits everywhere; of digits, exact.
    for name, each in (("all_reduce", digits), ("all_reduce of fractions", drawn)):
        x, more = each[rank].clone(), tree_sum(each)
        yield _Attempt(
            name, "all_reduce", x, lambda by, x=x: (x, by.all_reduce(x, total)), more, each is digits
        )
    if part:
        buffer = algorithm.buffer(whole, drawn[rank]).copy_(drawn[rank])
        yield _Attempt(
            "all_reduce of a buffer", "all_reduce", buffer,
            lambda by: (buffer, by.all_reduce(buffer, total)), tree_sum(drawn), False, later=True,
        )  # fmt: skip
        most = drawn[rank].clone()
        yield _Attempt(
            "all_reduce to the greatest", "all_reduce", most,
            lambda by: (most, by.all_reduce(most, greatest)), torch.stack(drawn).amax(0),
        )  # fmt: skip
    for later in (False, True):
        out = torch.empty_like(mine)
        yield _Attempt(
            "all_gather" + ", later" * later, "all_gather", part_of_mine,
            lambda by, o=out, later=later: (o, by.all_gather(o, part_of_mine, later)),
            torch.cat([x[:part] for x in digits]), later=later,
        )  # fmt: skip
    dealt, scattered = torch.empty_like(mine), torch.empty_like(part_of_mine)
    of_mine = [x.view(size, part)[rank] for x in digits]
    yield _Attempt(
        "all_to_all", "all_to_all", mine, lambda by: (dealt, by.exchange(dealt, mine)), torch.cat(of_mine)
    )
    kept = mine.clone()
    yield _Attempt(
        "reduce_scatter", "reduce_scatter", kept,
        lambda by: (scattered, by.reduce_scatter(scattered, kept)), tree_sum(of_mine),
    )  # fmt: skip
    yield _Attempt("input of reduce_scatter", "all_to_all", kept[:0], lambda by: (kept, None), mine)


def _rooted(case: OperationCase, pg: Any) -> Iterator[_Attempt]:
    """Operations that begin or end with one rank: the first, and the last."""
    rank, size, part = pg.rank(), pg.size(), case.part
    each = [_digits(other, part * size, case.dtype) for other in range(size)]
    parts = [x[:part].clone() for x in each]
    for root in dict.fromkeys((0, size - 1)):
        here, words = rank == root, f" with root {root}"
        x, y = each[rank].clone(), each[rank].clone()
        out, whole = torch.empty_like(parts[0]), torch.empty_like(x)
        my_part, source = parts[rank], each[root] if here else None
        yield _Attempt(
            "broadcast" + words, "broadcast", x,
            lambda by, x=x, root=root: (x, by.broadcast(x, root)), each[root], root=root,
        )  # fmt: skip
        yield _Attempt(
            "reduce" + words, "reduce", y,
            lambda by, y=y, root=root: (y, by.reduce(y, root, dist.ReduceOp.SUM)),
            tree_sum(each) if here else None, root=root,
        )  # fmt: skip
        yield _Attempt(
            "scatter" + words, "scatter", whole,
            lambda by, o=out, g=source, root=root: (o, by.scatter(o, g, root)),
            each[root].view(size, part)[rank], root=root,
        )  # fmt: skip
        taken = whole if here else None
        yield _Attempt(
            "gather" + words, "gather", my_part,
            lambda by, t=taken, my_part=my_part, root=root: (t, by.gather(t, my_part, root)),
            torch.cat(parts) if here else None, root=root,
        )  # fmt: skip


class _Counter:
    """Counts bytes that a group of ranks on threads sends: messages as they are, its own collectives by the engine's
    count."""

    def __init__(self, pg: Any, size: int) -> None:
        self.sent, self._size, self._pg = 0, size, pg
        collectives = (
            ("allreduce", "all_reduce"),
            ("all_gather_single", "all_gather"),
            ("all_to_all_single", "all_to_all"),
        )
        self._names = ["send", *(name for name, _ in collectives)]
        self.sees = isinstance(pg, ThreadGroup)  # others are not to be looked into
        for name, op in (("send", ""), *collectives) if self.sees else ():
            setattr(pg, name, self._counted(getattr(pg, name), op))

    def stop(self) -> None:
        for name in self._names if self.sees else ():
            delattr(self._pg, name)

    def _counted(self, call: Callable[..., Any], op: str) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            tensors: Sequence[Tensor] = (
                args[0] if isinstance(args[0], list) else [args[-1] if op else args[0]]
            )
            if op in ("all_gather", "all_to_all"):  # (output, input, ...)
                tensors = [args[1]]
            nbytes = sum(x.nbytes for x in tensors)
            self.sent += Engine().sent(op, nbytes, self._size) if op else nbytes
            return call(*args, **more)

        return counted
