"""Plant each bug in a copy of the source, ask `verify` and then the quick tests beside it, and print who found it.

python -m tests.verify.planted                       # all, about half a minute each
python -m tests.verify.planted --only lora sync      # those whose names begin so
python -m tests.verify.planted --part 0/3 --trust    # every third one, from the first on; quick tests are known to pass

The working tree is not touched. Tests that fail without any bug are told first, since they could find nothing. The exit
code is 1 where more than one bug in twenty survives.
"""

import argparse
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from compileall import compile_dir
from contextlib import suppress
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory

import pytest

from tests.verify.planted.bug import ROOT, SOURCE, TextBug, all_bugs

PATIENCE = 200.0
"""Seconds that a proof, or the tests of one bug, may take: whatever hangs is found by its being late."""
QUICK = "not slow and not gpu and not root"


def main(words: Sequence[str]) -> int:
    """0 where at least 19 of 20 bugs are found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth bug, from the Ith on")
    parser.add_argument("--trust", action="store_true", help="leave out the run of the tests without a bug")
    asked = parser.parse_args(words)
    first, every = map(int, asked.part.split("/"))
    bugs = [bug for bug in all_bugs() if bug.name.startswith(tuple(asked.only))][first::every]
    _import_what_is_not_ours()
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        # What is compiled anew is a bug's file alone.
        compile_dir(copy, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        tests = sorted({test for bug in bugs for test in bug.tests}) if not asked.trust else ()
        ill = [test for test in tests if tested(str(copy), test) != "0"]
        print("".join(f"FAILS WITHOUT A BUG  {test}\n" for test in ill), end="", flush=True)
        alive = 0
        for bug in bugs:
            begun, by = time.monotonic(), found_by(bug, copy, ill)
            alive += not by
            row = f"| {bug.name} | {bug.file} | {by or 'SURVIVES'} | {time.monotonic() - begun:.0f} s |"
            print(row, flush=True)
    print(f"{len(bugs) - alive} of {len(bugs)} found ({(len(bugs) - alive) / max(1, len(bugs)):.0%})")
    return 20 * alive > len(bugs) or bool(ill)


def found_by(bug: TextBug, copy: Path, ill: Sequence[str]) -> str:
    """Who finds the bug: `verify PLAN: CAUSE`, or the test file; "" if nobody does. ill: tests that say nothing."""
    place = bug.path(copy)
    source = place.read_text()
    place.write_text(bug.planted(source))
    try:
        for plan in bug.plans:
            said = forked(str(copy), lambda plan=plan: proven(bug, plan))
            if said != "0":
                return f"verify {plan}: {said}"
        for test in bug.tests:
            if test not in ill and (said := tested(str(copy), test)) != "0":
                return f"{test}: {said}"
        return ""
    finally:
        place.write_text(source)


def proven(bug: TextBug, plan: str) -> str:
    """What the proof of a plan says of the source that is imported; "0" where it finds nothing wrong."""
    from tests.threads import ThreadForkServer
    from tests.verify.mutations.planting import Bug
    from tests.verify.mutations.proving import recipe
    from unisono.plan import Plan
    from unisono.verify.prover import ENTRY, prove, prove_on

    about = Bug(
        bug.name, plan, (), 0.1, "adamw", True, bug.recipe, bug.text, "", None, "", lambda patch: None
    )
    with TemporaryDirectory() as folder:
        what, plans = recipe(about, Path(folder)), [Plan.parse(plan)]
        if bug.backend:
            (proof,) = prove(what, plans, steps=3, backend=bug.backend, keep_going=True)
        else:
            (proof,) = prove_on(ThreadForkServer(ENTRY), what, plans, 3)
    return "0" if proof.passed else proof.cause or "unlike one device"


def tested(source: str, test: str) -> str:
    """The first that fails of a file's quick tests with the source that lies there; "0" where all pass."""

    def run() -> str:
        heard = Failures()
        words = ["-q", "-x", "-p", "no:cacheprovider", "-m", QUICK, f"tests/{test}"]
        code = pytest.main(words, plugins=[heard])
        return "0" if code == pytest.ExitCode.OK else heard.first or f"exit {int(code)}"

    return forked(source, run)


class Failures:
    """The name of the first test that failed, or could not be collected."""

    first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.first:
            self.first = report.nodeid.rpartition("::")[2]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.first:
            self.first = f"{report.nodeid} is not collected"


def forked(source: str, run: Callable[[], str]) -> str:
    """What `run` returns in a process of its own that imports `unisono` from the folder `source`, as do those that it
    starts; what it raises, or "late", where that is all."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        os.setsid()
        said = "died"
        try:
            _import_from(source)
            said = run()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    return _heard(pid, ours)


def _import_from(source: str) -> None:
    """`unisono` of this folder, here and in what is started; nothing is said on stdout or stderr."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.chdir(ROOT)
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = source
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def _heard(pid: int, pipe: int) -> str:
    """What the process wrote before its end; it and all that it started are gone then."""
    with os.fdopen(pipe, "rb") as told:
        ready, _, _ = select.select([told], [], [], PATIENCE)
        said = told.readline().decode() if ready else "late"
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return said or "died"


def _import_what_is_not_ours() -> None:
    """Once, in the process that forks; a torch takes seconds. Nothing of `unisono` is among it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hypothesis
    import numpy
    import pydantic
    import safetensors.torch
    import torch
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    assert (hypothesis, numpy, pydantic, safetensors) and "unisono" not in sys.modules


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
