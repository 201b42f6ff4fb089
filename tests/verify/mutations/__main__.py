"""`python -m tests.verify.mutations [NAME ...]`: plant bugs, and print who found each, then the figures by kind.

NAME: all that begin so, by default every bug. `a0 a1 a2 a3 a4 a5 a6` are those that a reviewer planted and that got
through then; `real` are those that were really made, each with its source.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Mapping

import pytest

from tests.verify.mutations.entry import CATALOGUE, UNSEEN
from tests.verify.mutations.planting import Bug, Planting
from tests.verify.mutations.proving import Found, prove_with

KINDS: Mapping[str, Callable[[Bug], object]] = {
    "all": lambda bug: True,
    "two or three axes at once": lambda bug: len(bug.degrees) > 1,
    "a user's own loop": lambda bug: bug.loop is not None,
    "a degree above 2": lambda bug: max(bug.degrees, default=1) > 2,
    "really made": lambda bug: bug.source,
    "one device alike, by a quick test": lambda bug: bug.test,
}


def killed(bug: Bug) -> bool:
    """Whether its quick test fails while the bug is there, and passes without."""
    calls = ["-q", "-x", "-p", "no:cacheprovider", f"tests/{bug.test}"]
    with contextlib.redirect_stdout(io.StringIO()):
        with Planting().of(bug):
            ill = pytest.main(calls)
        well = pytest.main(calls)
    return (ill, well) == (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK)


def main(names: list[str]) -> int:
    """0 if all are caught, and eight of ten that `verify` catches are named rightly."""
    chosen = {
        n: b for n, b in (CATALOGUE | UNSEEN).items() if not names or any(n.startswith(x) for x in names)
    }
    found = prove_with(bug for bug in chosen.values() if not bug.test)
    found |= {n: Found(killed(b), "test", b.test, 0) for n, b in chosen.items() if b.test}
    right = {n for n, f in found.items() if f.caught and (chosen[n].test or f.named(chosen[n]))}
    for name, bug in chosen.items():
        one = found[name]
        word = ("caught" if one.caught else "ESCAPED") + (
            "" if name in right or not one.caught else " MISNAMED"
        )
        source = f"  [{bug.source}]" if bug.source else ""
        print(f"{word}  {name}{source}  step {one.step}  {one.cause}: {one.text}")
    for kind, belongs in KINDS.items():
        some = [n for n, b in chosen.items() if belongs(b)]
        caught = [n for n in some if found[n].caught]
        first = sum(found[n].step == 1 for n in caught)
        share = f"{len(right & set(some))} ({len(right & set(some)) / max(1, len(some)):.0%})"
        print(
            f"{kind}: {len(caught)} of {len(some)} caught, {first} in the first step, the cause right in {share}"
        )
    return not all(f.caught for f in found.values()) or len(right) < 0.8 * len(chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
