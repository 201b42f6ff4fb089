"""A user's own loop, played by one process and by several: are the gradients of each step those of one process?

What the first steps of a run cannot notice is seen here: losses in custom autograd functions, samples that meet in the
model, draws that decide, data that ranks order for themselves. Errors are relative to the largest gradient of the
model, so that noise in a gradient that should be zero is none.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from unisono.launch.nursery import Nursery
from unisono.library.gradient_check import home_of, path_of, run
from unisono.plan import Plan
from unisono.spec.errors import VerifyMismatch

ENTRY = "unisono.library.loop_check_rank:main"
BOUND = 1e-9  # of float64 in a few steps: a mistake is larger, rounding is 1e-13 or so
TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """errors: of each step, the largest difference of a gradient over the model's largest. first: (step, gradient) of
    the first that is too large. notes: what the loop was told while it ran."""

    passed: bool
    errors: tuple[float, ...]
    first: tuple[int, str] | None
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        if self.passed:
            worst = max(self.errors, default=0.0)
            return f"ok: {len(self.errors)} steps, largest error {worst:.1e} (bound {BOUND:.0e})"
        step, name = self.first or (0, "nothing")
        told = "".join(f"\n  told: {note}" for note in self.notes if note.startswith("U-"))
        size = f"{self.errors[step - 1]:.1e}" if 0 < step <= len(self.errors) else "missing"
        return f"WRONG: step {step}, the gradient of {name}: error {size} (bound {BOUND:.0e}){told}"

    def check(self) -> None:
        """Raises VerifyMismatch V01 if anything is wrong."""
        if not self.passed:
            raise VerifyMismatch("the loop does not compute what it does in one process", where=str(self))


def prove_loop(loop: Callable[..., Any], plan: Plan, steps: int) -> LoopVerdict:
    """See `unisono.prove`. Raises what the loop raises, in one process or in several."""
    ranks = plan.fill(1).world
    with (
        Nursery(ENTRY, path=path_of(loop)) as nursery,
        tempfile.TemporaryDirectory(prefix="unisono-loop-") as name,
    ):
        call = {**home_of(loop), "folder": name, "steps": steps}
        run(nursery, {**call, "plan": "dp=1", "kind": "one"}, 1, TIMEOUT)
        (told, *_) = run(nursery, {**call, "plan": str(plan), "kind": "all"}, ranks, TIMEOUT)
        one, several = (
            [load_file(path) for path in sorted(Path(name).glob(f"{kind}-*"))] for kind in ("one", "all")
        )
    return judged(one, several, tuple(told["notes"]))


def judged(
    one: list[dict[str, Tensor]], several: list[dict[str, Tensor]], notes: tuple[str, ...]
) -> LoopVerdict:
    """one, several: of each step, the gradients by name."""
    errors: list[float] = []
    first: tuple[int, str] | None = None
    for step, (a, b) in enumerate(zip(one, several, strict=False), start=1):
        found = differences(a, b)
        errors.append(max(found.values(), default=0.0))
        wrong = next((name for name, error in found.items() if not error <= BOUND), None)
        if wrong is not None and first is None:
            first = step, wrong
    if first is None and (len(one) != len(several) or not one):
        first = min(len(one), len(several)) + 1, "a step that is missing"
    return LoopVerdict(first is None, tuple(errors), first, notes)


def differences(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, float]:
    """name -> the largest difference over the largest gradient of all; infinite where one has none."""
    largest = max((float(x.abs().max()) for x in a.values() if x.numel()), default=0.0) or 1.0
    found = {
        name: float((a[name] - b[name]).abs().max()) / largest if name in b else float("inf")
        for name in a
        if a[name].numel()
    }
    return found | {name: float("inf") for name in b if name not in a}
