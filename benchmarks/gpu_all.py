"""Everything that a GPU has to show, as one table: `python benchmarks/gpu.py --all`, or `make gpu`.

Each row is `ok`, `failed`, or `not run` with what is missing. Rows come as they are known. The exit code is 0 where all
rows are ok, 1 where one failed, and 3 where none failed and some have not run. `--device sim` rehearses every row on a
simulated device: its times mean nothing, and the rest is held to the same limits.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIM = "sim"
OFF = 0.05
"""How far the ledger may be from the peak of the device's memory."""
SLOWEST = 0.95
"""Of the hand-written loop's tokens per second."""
APART = 1e-2
"""How far the first losses of the same training may be from each other, in bf16."""
LARGE = {
    "n_layer": 8,
    "n_head": 16,
    "d_model": 1024,
    "context": 1024,
}  # beside which workspaces of libraries are small
STEPS, EVERY, KILLED = 40, 10, 15


@dataclass(frozen=True, slots=True)
class ReadinessRow:
    """what: was looked at. state: `ok`, `failed` or `not run`. says: its figures, or why."""

    what: str
    state: str
    says: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.what:24} {self.state:8} {self.seconds:6.0f} s  {self.says}"


Found = tuple[bool, str]  # (whether it is as it should be, figures)


def table(options: argparse.Namespace, gpus: int, race: Callable[..., dict[str, Any]]) -> int:
    """Print all rows; the exit code. race: as `gpu.races`, gives rows of races for (ranks, options)."""
    rows = []
    for row in readiness(options, gpus, race):
        rows.append(row)
        if not options.json:
            print(row, flush=True)
    states = [row.state for row in rows]
    if options.json:
        print(json.dumps({"schema_version": 1, "rows": [asdict(row) for row in rows]}))
    else:
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "failed", "not run"))
        print(f"{len(rows)} rows: {counts}" + (" (a rehearsal: no GPU has run)" if is_sim(options) else ""))
    return 1 if "failed" in states else 3 if "not run" in states else 0


def is_sim(options: argparse.Namespace) -> bool:
    return options.device == SIM


def readiness(options: argparse.Namespace, gpus: int, race: Callable[..., Any]) -> Iterator[ReadinessRow]:
    """Row by row. gpus: that torch can use."""
    lacking = "" if gpus or is_sim(options) else "no NVIDIA GPU here"
    many = 2 if is_sim(options) else gpus
    several = lacking or ("" if many > 1 else "one device here: NCCL between GPUs needs two")
    backend = SIM if is_sim(options) else "nccl" if gpus > 1 else "nccl:shared"
    kind = "suite on the device" if is_sim(options) else "NCCL suite"
    checks: list[tuple[str, str, Callable[[], Found]]] = [
        ("device", lacking, lambda: doctor(is_sim(options))),
        (kind, lacking, lambda: suite(is_sim(options))),
        ("speed, one device", lacking, lambda: speed(race("plain", 1), options)),
        ("speed, DDP", several, lambda: speed(race("ddp", many), options)),
        ("speed, FSDP", several, lambda: speed(race("fsdp", many), options)),
        ("memory against ledger", lacking, lambda: memory(backend)),
        ("out of memory", lacking, lambda: exhausted(is_sim(options))),
        ("a killed rank", lacking, lambda: recovery(backend)),
    ]
    for what, missing, check in checks:
        yield ReadinessRow(what, "not run", missing) if missing else checked(what, check)


def checked(what: str, check: Callable[[], Found]) -> ReadinessRow:
    """The row of a check; one that raises has failed."""
    begun = time.monotonic()
    try:
        holds, says = check()
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        holds, says = False, f"{type(error).__name__}: {lines[0][:160]}"
    return ReadinessRow(what, "ok" if holds else "failed", says, time.monotonic() - begun)


def unisono(*words: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", *words], capture_output=True, text=True, timeout=timeout
    )


def doctor(sim: bool) -> Found:
    """Which devices there are, and what drives them."""
    if sim:
        return True, "simulated, on the CPU"
    done = unisono("doctor", "--json")
    seen = {check["name"]: check["detail"] for check in json.loads(done.stdout)["checks"]}
    return "gpu" in seen, seen.get("gpu", "doctor names no GPU")


def suite(sim: bool) -> Found:
    """The tests of the device: plans against one device, checkpoints, host waits."""
    which = ["-m", "not slow", "tests/comm/sim"] if sim else ["-m", "gpu", "tests/gpu"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tests.xml")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={out}", *which]
        subprocess.run(words, cwd=ROOT, capture_output=True, timeout=3000.0, check=False)
        (tests,) = ET.parse(out).getroot().iter("testsuite")
    count = {key: int(tests.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    names = [case.get("name", "") for case in tests.iter("testcase") if case.find("failure") is not None]
    says = f"{passed} tests passed, {bad} failed, {count['skipped']} skipped"
    return not bad and passed > 0, says + (f": {', '.join(names[:3])}" if names else "")


def speed(row: dict[str, Any], options: argparse.Namespace) -> Found:
    """A race beside the hand-written loop; how fast is asked of GPUs alone."""
    same = row["loss_difference"] < APART
    says = f"first losses differ by {row['loss_difference']:.0e}"
    if is_sim(options):
        return same, f"{says}; times mean nothing here"
    mfu = "no peak known" if row["ours_mfu"] is None else f"MFU {row['ours_mfu']:.1%}"
    says = (
        f"{mfu}, {row['ratio_vs_peer']:.3f} of {row['peer']} ({row['model']}, {row['ranks']} ranks), {says}"
    )
    return same and row["ratio_vs_peer"] >= SLOWEST, says


def memory(backend: str) -> Found:
    """The most that the device's allocator had given out in a step, beside the ledger, plan by plan."""
    from memory import PLANS, SIZES, row_of

    sizes, batch = (SIZES, 16) if backend == SIM else (LARGE, 8)
    rows = [row_of(plan, sizes, batch, backend) for plan in PLANS[:16]]
    far = max(rows, key=lambda row: abs(row["ratio"] - 1.0))
    says = f"{len(rows)} plans, at most {100 * abs(far['ratio'] - 1.0):.1f} % apart ({far['plan']})"
    return all(abs(row["ratio"] - 1.0) <= OFF for row in rows), says


def exhausted(sim: bool) -> Found:
    """A run that does not fit ends with exit code 5, the ledger and what would fit."""
    words = [
        "--plan",
        "dp=1",
        "--launch.backend",
        f"{SIM}:memory=20MiB" if sim else "nccl",
        "--train.steps",
        "1",
    ]
    if not sim:
        words += ["--model.d_model", "768", "--model.context", "1024", "--model.vocab", "50304"]
        words += ["--train.global_batch", "2048"]
    with tempfile.TemporaryDirectory() as folder:
        done = unisono("train", *words, "--out.dir", folder, "--out.report", "false")
    lines = [
        " ".join(line.split()) for line in done.stderr.splitlines() if line.startswith(("error", "  try"))
    ]
    return done.returncode == 5 and len(lines) == 2, f"exit {done.returncode}; {'; '.join(lines)}"


def recovery(backend: str) -> Found:
    """A rank is killed in mid-run: all end where the run that nothing happened to ends."""
    tiny = [
        "--model.n_layer",
        "2",
        "--model.d_model",
        "64",
        "--model.context",
        "64",
        "--train.global_batch",
        "8",
    ]
    plan = ["--plan", "dp=2", "--launch.backend", backend, "--train.steps", str(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--json", "--quiet", *plan, *tiny, "--train.save_every", str(EVERY)]
        words += ["--out.report", "false", "--out.dir"]
        whole = unisono(*words, f"{folder}/whole")
        begun = time.monotonic()
        killed = unisono(*words, f"{folder}/killed", "--chaos", f"kill:who=1:step={KILLED}")
        took = time.monotonic() - begun
    for done in (whole, killed):
        if done.returncode:
            return False, f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[0][:150]}"
    first, second = (json.loads(done.stdout) for done in (whole, killed))
    apart = abs(first["loss"] - second["loss"]) / abs(first["loss"])
    holds = second["restarts"] >= 1 and second["steps"] == STEPS and apart < 1e-3
    says = (
        f"{second['restarts']} restart, {second['steps']} steps in {took:.0f} s, last loss {apart:.0e} apart"
    )
    return holds, says
