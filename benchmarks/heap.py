"""What it brings that ranks keep the memory that they free: steps with and without, in processes that take turns.

python benchmarks/heap.py                 about three minutes
python benchmarks/heap.py --size small --rounds 3
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from step import SIZES

from unisono.launch.malloc_tuning import with_huge_pages


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5, help="of one process each way (default 5)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of steps in each process (default 6)")
    parser.add_argument("--play", choices=("keep", "give back"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        print(json.dumps(play(options.size[0], options.play == "keep", options.seconds)))
        return 0
    print("model  ratio of speeds  page faults a step  peak MiB     (with / without, medians)")
    for size in options.size:
        print(line_of(size, [pair(size, options.seconds) for _ in range(options.rounds)]), flush=True)
    return 0


def pair(size: str, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process that keeps, one that does not."""
    command = [sys.executable, __file__, "--size", size, "--seconds", str(seconds), "--play"]
    environs = {"keep": {**os.environ, **with_huge_pages(os.environ)}, "give back": {**os.environ}}
    said = [
        subprocess.run([*command, way], check=True, capture_output=True, text=True, env=environ).stdout
        for way, environ in environs.items()
    ]
    return json.loads(said[0]), json.loads(said[1])


def line_of(size: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    ratio = statistics.median(without["seconds"] / with_["seconds"] for with_, without in pairs)
    faults, peak = (
        " / ".join(f"{statistics.median(one[i][key] for one in pairs):,.0f}" for i in (0, 1))
        for key in ("faults", "peak_mib")
    )
    return f"{size:<6} {ratio:>15.3f}  {faults:>18}  {peak:>9}"


def play(size: str, keep: bool, seconds: float) -> dict[str, float]:
    """Seconds and page faults of a step (medians), and the peak of memory, of one rank on all cores."""
    import torch
    from peers import Task, ours

    from unisono.config import resolve
    from unisono.launch.context import NullChannel
    from unisono.launch.malloc_tuning import keep_freed_memory
    from unisono.observe.memory import peak_rss_mib
    from unisono.train.build.build import place_of
    from unisono.train.data.load import load

    if keep:
        keep_freed_memory(os.environ)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    resolved = resolve(SIZES[size], "dp=1", 1)
    place = place_of(0, 1, 0, "gloo", 600.0)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    task = Task(resolved.recipe, resolved.batch.micros, place, corpus)
    took: list[float] = []
    faults: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        racer = ours(task, resolved.plan, "dp=1", NullChannel(), Path(folder))
        for _ in range(5):
            racer.step()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            racer.step()
            took.append(time.perf_counter() - begun)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        racer.close()
    return {
        "seconds": statistics.median(took),
        "faults": statistics.median(faults),
        "peak_mib": peak_rss_mib(),
    }


if __name__ == "__main__":
    sys.exit(main())
