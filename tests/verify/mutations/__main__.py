"""`python -m tests.verify.mutations [NAME ...]`: plant bugs, and print who found each, then the figures.

NAME: all that begin so, by default every bug. `a0 a1 a2 a3 a4 a5 a6` are those that a reviewer planted and that got
through then.
"""

import contextlib
import io
import sys

import pytest

from tests.verify.mutations.entry import CATALOGUE, UNSEEN
from tests.verify.mutations.planting import Bug, Planting
from tests.verify.test_mutations import prove_with


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
    proofs = prove_with([bug for bug in chosen.values() if not bug.test])
    caught, right = 0, 0
    for name, bug in chosen.items():
        if bug.test:
            found, named = killed(bug), True
            said = bug.test
        else:
            proof = proofs[name]
            found, named, said = (
                not proof.passed,
                proof.cause in bug.causes,
                f"{proof.cause}: {proof.explanation}",
            )
        caught, right = caught + found, right + (found and named)
        print(f"{'caught' if found else 'ESCAPED'}{'' if named else ' MISNAMED'}  {name}  {said}")
    print(f"{caught} of {len(chosen)} caught, the cause right in {right} ({right / max(1, len(chosen)):.0%})")
    return caught < len(chosen) or right < 0.8 * len(chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
