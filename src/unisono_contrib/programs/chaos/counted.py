"""Was every leaf of every step counted once, and every sample once an epoch? Read off what ranks wrote down. No torch.

Under `--chaos` each rank writes a line into `leaves/rank-N.jsonl` when it begins to train in an epoch of members, and
one for each step that it is dealt leaves of. A step whose ranks were lost is made again in a later epoch, so the
attempt of the latest epoch counts. It was whole only if all of the epoch's ranks had leaves of it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono.observe.metrics import read_lines

FOLDER = "leaves"
MOST = 20
"""Problems that are told; what follows from one mistake is without end."""
Epoch = tuple[int, int]
"""How often the run was launched, and how often its ranks have met since."""


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's ranks. A last line that a killed rank did not finish is left out."""
    files = sorted((run_dir / FOLDER).glob("rank-*.jsonl"))
    return [line for path in files for line in read_lines(path)[0]]


def audit(lines: Iterable[Mapping[str, Any]], leaves: int, micro_batch: int, steps: int) -> list[str]:
    """What is wrong with the count of a run of `steps` steps, each of `leaves` leaves of `micro_batch` samples; nothing
    where every leaf of every step, and every position of the line of samples, was counted exactly once."""
    begun: dict[Epoch, dict[int, int]] = defaultdict(dict)  # epoch → rank → steps that its state had
    dealt: dict[int, dict[Epoch, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    problems: list[str] = []
    for line in lines:
        epoch, rank = (line["epoch"][0], line["epoch"][1]), line["rank"]
        if "begins" in line:
            begun[epoch][rank] = line["begins"]
        else:
            before = dealt[line["step"]][epoch].setdefault(rank, line)
            if before["leaves"] != line["leaves"]:
                problems.append(f"step {line['step']}: rank {rank} was assigned other leaves the second time")
    for epoch, ranks in sorted(begun.items()):
        if len(set(ranks.values())) > 1:
            problems.append(f"epoch {epoch}: ranks began after different steps: {ranks}")
    positions: Counter[int] = Counter()
    for step in range(steps):
        if not dealt[step]:
            problems.append(f"step {step}: nobody was assigned it")
            continue
        epoch = max(dealt[step])
        problems += _lost(step, epoch, begun)
        problems += _step(step, dealt[step][epoch], begun[epoch].keys(), leaves, positions)
    problems += _positions(positions, steps * leaves * micro_batch)
    return problems if len(problems) <= MOST else [*problems[:MOST], f"and {len(problems) - MOST} more"]


def _lost(step: int, counted: Epoch, begun: Mapping[Epoch, Mapping[int, int]]) -> list[str]:
    """A later epoch whose state is of before this step, and that did not make it again."""
    later = [e for e, ranks in begun.items() if e > counted and ranks and min(ranks.values()) <= step]
    return [f"step {step}: epoch {min(later)} began before it and did not make it again"] if later else []


def _step(
    step: int,
    by_rank: Mapping[int, Mapping[str, Any]],
    ranks: Iterable[int],
    leaves: int,
    positions: Counter[int],
) -> list[str]:
    """One attempt that counts. Ranks at one place of the data axes work on the same leaves together."""
    problems = [
        f"step {step}: rank {rank} was assigned nothing" for rank in sorted(set(ranks) - by_rank.keys())
    ]
    places: dict[tuple[int, ...], Any] = {}
    for rank, line in sorted(by_rank.items()):
        if places.setdefault(tuple(line["at"]), line["leaves"]) != line["leaves"]:
            problems.append(f"step {step}: rank {rank} was assigned other leaves than those of its replica")
    counts = Counter(leaf for place in places.values() for leaf, _ in place)
    for leaf in range(leaves):
        if counts[leaf] != 1:
            problems.append(f"step {step}: leaf {leaf} was counted {counts[leaf]} times")
    problems += [f"step {step}: there is no leaf {leaf}" for leaf in counts if not 0 <= leaf < leaves]
    positions.update(p for place in places.values() for _, part in place for p in part)
    return problems


def _positions(positions: Counter[int], count: int) -> list[str]:
    wrong = [p for p in range(count) if positions[p] != 1]
    problems = [f"sample at position {p} was counted {positions[p]} times" for p in wrong[:3]]
    return problems + [f"there is no position {p}" for p in sorted(positions) if not 0 <= p < count][:3]


def made_again(lines: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """(whole steps that were lost and made again, steps that were broken off and made again)."""
    steps: dict[Epoch, set[int]] = defaultdict(set)
    begins: dict[Epoch, int] = {}
    for line in lines:
        epoch = (line["epoch"][0], line["epoch"][1])
        if "begins" in line:
            begins[epoch] = line["begins"]
        else:
            steps[epoch].add(line["step"])
    whole = broken = 0
    farthest = -1
    for epoch in sorted(begins):
        if farthest >= begins[epoch]:  # the farthest step had begun, so those before it were whole
            whole, broken = whole + farthest - begins[epoch], broken + 1
        farthest = max(steps[epoch], default=begins[epoch] - 1)
    return whole, broken
