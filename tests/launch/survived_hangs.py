"""Hangs that a run survives: `python -m tests.launch.survived_hangs [NAME ...]` plays those of `hangs` in which ranks can
be replaced, recipes under `unisono train`, and prints a table.

The culprit's process is replaced, and the run has to end by itself with nobody left behind. Under `sync=canonical` its
weights have the bits of a run that nobody disturbed; where a plan does not take that, they are equal to rounding.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tests.launch.hangs import CASES, Case, began, left_of
from unisono.plan import Plan
from unisono.train.state.checkpoint import read_full

DEADLINE = 3.0
FIXED = ("sleep", "stop", "busy", "lock", "read")
"""Not `barrier` and `shapes`: calls that do not fit each other are the program's, and a new process would make them too."""
SURVIVED = tuple(
    case
    for case in CASES
    if case.kind == "recipe" and case.starter == "own" and case.fault.split(":")[0] in FIXED
)


def canonical(case: Case) -> Case:
    """The same under sync=canonical, if its plan takes that."""
    plan = f"{case.plan} sync=canonical"
    takes = not {"tp", "zero"} & {part.partition("=")[0] for part in case.plan.split()}
    return replace(case, plan=plan) if takes and Plan.parse(plan) else case


def weights(case: Case, folder: Path) -> tuple[dict[str, torch.Tensor], str, list[int]]:
    """What a run ends with; what it printed; who is left of it. No weights if it did not end well."""
    folder.mkdir()
    with began(case, folder, DEADLINE, "--launch.recover", "true", "--json", HANG_ONCE="1") as (
        processes,
        mark,
    ):
        try:
            code = processes[0].wait(120)
        except TimeoutError:
            code = None
        left = left_of(mark) if code is not None else []
    output = (folder / "output").read_text(errors="replace")
    if code != 0:
        return {}, f"{output}\nexit {code}", left
    told = next(json.loads(line) for line in output.splitlines() if line.startswith("{"))
    return read_full(folder / str(told["checkpoint"])), output, left


def wrong(case: Case, folder: Path) -> list[str]:
    """What is wrong with how a run came through a hang."""
    case = canonical(case)
    mine, output, left = weights(case, folder / "hang")
    other, *_ = weights(replace(case, fault="nothing:nowhere:0:0"), folder / "undisturbed")
    faults = [f"left {left}"] * bool(left)
    if not mine:
        return [*faults, output[-2000:]]
    if not (folder / "hang" / "began").exists():
        faults.append("nothing hung")
    if "new process" not in output:
        faults.append("nobody was replaced")
    if "canonical" in case.plan:
        same = mine.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in mine.items())
    else:
        same = all(torch.allclose(x.double(), other[name].double(), 1e-4, 1e-6) for name, x in mine.items())
    return faults + ["other weights"] * (not same)


def main(names: list[str]) -> int:
    failed = 0
    chosen = [case for case in SURVIVED if not names or case.name in names]
    for case in chosen:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            faults = wrong(case, Path(folder))
        failed += bool(faults)
        same = "bits" if "canonical" in canonical(case).plan else "to rounding"
        print(f"{'ok' if not faults else 'WRONG':<6} {case.name:<44} {'; '.join(faults) or same}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} survived")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
