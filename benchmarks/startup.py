"""How long four ranks take from the command to their first step, beside `python -c "import torch"`.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 9

Both are started again and again, in turn, as a person would start them: a new process each, files in the page cache.
The clock of ours stops when the line of the first step appears on standard error, so the figure holds a whole step of
all ranks more than "ready". The bound is 1.6 times the import plus one second.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

FACTOR, EXTRA = 1.6, 1.0


def main() -> int:
    options = arguments()
    imports: list[float] = []
    starts: list[float] = []
    once_import()  # the page cache
    for _ in range(options.rounds):
        imports.append(once_import())
        starts.append(once_start(options.plan))
        if not options.json:
            print(
                f"import torch {imports[-1]:6.2f} s   first step of {options.plan} {starts[-1]:6.2f} s",
                flush=True,
            )
    result = figures(imports, starts, options.plan)
    if options.json:
        print(json.dumps({"schema_version": 1, **result}))
    else:
        print(
            f"median: {result['ratio_vs_import']:.2f} times the import; {result['share_of_bound']:.2f} of the bound"
            f" of {FACTOR} x import + {EXTRA:.0f} s ({'within' if result['pass'] else 'NOT within'})"
        )
    return 0 if result["pass"] or not options.strict else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="starts of each (default 5)")
    parser.add_argument("--plan", default="dp=2 pp=2", help="what to start (default dp=2 pp=2: four ranks)")
    parser.add_argument("--strict", action="store_true", help="exit 1 where the bound is broken")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    return parser.parse_args()


def once_import() -> float:
    """Seconds of one `python -c "import torch"`."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun


def once_start(plan: str) -> float:
    """Seconds from the command to the line of the first step; the run is then ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "unisono", "train", "--demo", "--plan", plan, "--out.dir", folder]
        begun = time.perf_counter()
        with subprocess.Popen(
            [*command, "--train.steps", "100000", "--no-color"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                took = until_first_step(process, begun)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        return took


def until_first_step(process: "subprocess.Popen[str]", begun: float) -> float:
    said: list[str] = []
    for line in process.stderr or ():
        said.append(line)
        if line.startswith("step "):
            return time.perf_counter() - begun
    raise SystemExit("the run ended before its first step:\n" + "".join(said))


def figures(imports: list[float], starts: list[float], plan: str) -> dict[str, Any]:
    """Medians; the bound is taken round by round, since the machine's speed changes under both."""
    shares = [start / (FACTOR * one + EXTRA) for one, start in zip(imports, starts, strict=True)]
    share = statistics.median(shares)
    return {
        "plan": plan,
        "rounds": len(starts),
        "import_s": statistics.median(imports),
        "first_step_s": statistics.median(starts),
        "ratio_vs_import": statistics.median(s / i for i, s in zip(imports, starts, strict=True)),
        "share_of_bound": share,
        "pass": share <= 1.0,
    }


if __name__ == "__main__":
    sys.exit(main())
