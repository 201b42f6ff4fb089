"""Runs under random faults, beside the same runs without: `python -m tests.launch.soak --seeds 3`.

Ranks, the helper and the supervisor are among the victims. Each run has to end by itself, with the weights of the
undisturbed one: the same bits where the plan is canonical, within rounding elsewhere. Every leaf of every step has to be counted once. Prints a row a run, then times by kind of fault.

    python -m tests.launch.soak --seeds 3 --steps 200 --faults 20
    python -m tests.launch.soak --plans "dp=4 sync=canonical" --kinds kill,stop,cut,segv,pause,slow,fill,clock
    python -m tests.launch.soak --supervisor 3 --helper 3     # and kill these so often beside what is drawn
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from unisono_contrib.programs.chaos import counted, sequel
from unisono_contrib.programs.chaos.fault import ABOVE, FAULTS
from unisono_contrib.programs.chaos.script import DRAWN, read

PLANS = ("dp=4 sync=canonical", "dp=2 pp=2", "dp=2 shard=2 sync=canonical", "dp=2 shard=2")
ROUNDING = 2e-3
"""Difference of all weights over their size up to which two runs are the same but for rounding: that of one last bit
grows in some hundred steps, a step or a batch that was lost leaves more than ten times as much."""
BATCH, MICRO = 16, 2
RECIPE = """
name = "soak"
seed = 1
[model]
kind = "gpt"
n_layer = {layers}
n_head = 2
d_model = {width}
context = 32
[data]
source = "text:{text}"
tokenizer = "byte"
[train]
steps = {steps}
global_batch = 16
micro_batch = 2
lr = 1e-3
eval_every = 0
save_every = {save_every}
[launch]
threads_per_rank = 1
[out]
report = false
"""


Start = Callable[[list[str]], tuple[int, str, str]]


@dataclass
class Soaked:
    """One run: what it said, its weights, and what is wrong with it."""

    plan: str
    seed: int | None
    said: dict[str, Any]
    seconds: float
    run_dir: Path
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    difference: float = 0.0

    def digest(self) -> str:
        """SHA-256 over names and bytes of all that the last checkpoint holds."""
        sha = hashlib.sha256()
        for name in sorted(self.weights):
            sha.update(name.encode() + self.weights[name].tobytes())
        return sha.hexdigest()


def write_recipe(folder: Path, steps: int, layers: int = 2, width: int = 32, save_every: int = 0) -> Path:
    """A tiny GPT on a text made here, so that a run is its faults and not its data."""
    drawn = random.Random(5)
    words = ["".join(drawn.choice("abcdefghij") for _ in range(drawn.randrange(2, 7))) for _ in range(50)]
    (folder / "text.txt").write_text(" ".join(drawn.choice(words) for _ in range(60_000)))
    path = folder / "soak.toml"
    filled = {"text": folder / "text.txt", "steps": steps, "layers": layers, "width": width}
    path.write_text(RECIPE.format(**filled, save_every=save_every))
    return path


def started(words: list[str]) -> tuple[int, str, str]:
    """`unisono words`, a process: its exit code, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *words], capture_output=True, text=True, env=_environ()
    )
    return done.returncode, done.stdout, done.stderr


def run(
    recipe: Path,
    plan: str,
    seed: int | None = None,
    chaos: str = "",
    start: Start = started,
) -> Soaked:
    """Play it to its end, to which nobody helps it."""
    out = recipe.parent / "runs" / f"{plan.replace(' ', '_')}-{seed}"
    extra = ["--out.dir", str(out), *(["--chaos", chaos] if chaos else [])]
    begun = time.monotonic()
    code, stdout, stderr = start(["train", str(recipe), "--plan", plan, "--json", *extra])
    folders = sorted(out.glob("soak/*-*"))
    folder = folders[0] if folders else out
    said = json.loads(stdout) if stdout.strip() else {"what": stderr[-2000:]}
    out.mkdir(parents=True, exist_ok=True)
    (out / "stderr.txt").write_text(stderr)
    got = Soaked(plan, seed, said, time.monotonic() - begun, folder)
    if len(folders) > 1:
        got.problems.append(f"more than one folder: {[path.name for path in folders]}")
    if code:
        got.problems.append(f"ended with {code}: {said.get('what')} {said.get('where', '')}")
    else:
        for path in sorted(Path(said["checkpoint"]).glob("*.safetensors")):
            got.weights.update(load_file(path))
    return got


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def compare(got: Soaked, plain: Soaked, steps: int) -> None:
    """Put down what is wrong with a run under faults, beside the one without."""
    lines = counted.read(got.run_dir)
    got.problems += counted.audit(lines, BATCH // MICRO, MICRO, steps)
    rows = sequel.what_followed(sequel.read(got.run_dir))
    for row in rows:
        if row["injected"] is None:
            got.problems.append(f"never came: {row}")
        elif FAULTS[row["what"]].loses and row.get("next") is None:
            got.problems.append(f"not followed by a step: {row}")
    if not got.weights:
        return
    if got.weights.keys() != plain.weights.keys():
        got.problems.append("other tensors than the undisturbed run")
        return
    off = sum(
        float(np.square(got.weights[n] - plain.weights[n], dtype=np.float64).sum()) for n in got.weights
    )
    size = sum(float(np.square(plain.weights[n], dtype=np.float64).sum()) for n in got.weights)
    got.difference = (off / size) ** 0.5
    if "canonical" in got.plan and got.digest() != plain.digest():
        got.problems.append(f"other bits than the undisturbed run, by {got.difference:.1e}")
    if got.difference > ROUNDING:
        got.problems.append(f"weights differ by {got.difference:.1e}, which is no rounding")


def line_of(got: Soaked, plain: Soaked) -> str:
    """A row of the table."""
    rows = sequel.what_followed(sequel.read(got.run_dir))
    told, (whole, broken) = sequel.summed_up(rows), counted.made_again(counted.read(got.run_dir))
    bits = "same" if got.digest() == plain.digest() else f"{got.difference:.0e}"
    times = "  ".join(
        _times([row[name] for row in rows if row.get(name) is not None]) for name in sequel.TIMES
    )
    played = f"{told['injected']}/{told['planned']}"
    state = "FAILED" if got.problems else "ok"
    return (
        f"{got.plan:<28} {got.seed!s:>4}  {played:>6}  {told['losses']:>6}  {whole:>5}  {broken:>6}  {bits:>6}"
        f"  {times}  {got.seconds:>6.1f}  {state}"
    )


def _times(values: list[float]) -> str:
    return f"{median(values):>5.2f} {max(values):>5.2f}" if values else "          -"


HEAD = (
    f"{'plan':<28} seed  played  losses  steps  broken    bits  {'detected':>11}  {'all leave':>11}  {'all train':>11}"
    f"  {'next step':>11}  {'total':>6}\n"
    f"{'':<28}                     lost   again          {'  '.join(['  med   max'] * 4)}  seconds"
)


def by_kind(runs: list[Soaked]) -> list[str]:
    """Seconds from each kind of fault to what followed, over all runs."""
    rows = [row for got in runs for row in sequel.what_followed(sequel.read(got.run_dir))]
    lines = []
    kind_of = lambda row: row["what"] + (f" {row['who']}" if row["who"] in ABOVE else "")
    for kind in sorted({kind_of(row) for row in rows if row.get("next") is not None}):
        own = [row for row in rows if kind_of(row) == kind and row.get("next") is not None]
        times = "  ".join(
            _times([row[name] for row in own if row[name] is not None]) for name in sequel.TIMES
        )
        lines.append(f"{kind:<28} {len(own):>4}  {'':>6}  {'':>6}  {'':>5}  {'':>6}  {'':>6}  {times}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", default=",".join(DRAWN))
    for who in ABOVE:
        parser.add_argument(f"--{who}", type=int, default=1, help=f"how often the {who} is killed, too")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--keep", help="a folder for the runs, which are thrown away without")
    given = parser.parse_args()
    runs: list[Soaked] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as thrown:
        folder = Path(given.keep or thrown)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = write_recipe(folder, given.steps, save_every=given.save_every)
        for plan in given.plans:
            plain = run(recipe, plan)
            print(
                f"{plan:<28} {'none':>4}  {plain.digest()[:32]} {plain.seconds:.1f} s",
                *plain.problems,
                flush=True,
            )
            for seed in range(given.first_seed, given.first_seed + given.seeds):
                chaos = _script(given, seed, recipe.parent)
                got = run(recipe, plan, seed, chaos)
                compare(got, plain, given.steps)
                runs.append(got)
                print(line_of(got, plain), *got.problems, sep="\n    ", flush=True)
        print(*by_kind(runs), sep="\n")
    failed = sum(bool(got.problems) for got in runs)
    print(f"{len(runs)} runs, {failed} failed; numpy {np.__version__}, load {os.getloadavg()[0]:.1f}")
    return int(failed > 0)


def _script(given: argparse.Namespace, seed: int, folder: Path) -> str:
    """The random faults of a seed, with those of the processes above the ranks between them, as a file."""
    text = f"random:seed={seed}:faults={given.faults}:kinds={given.kinds}"
    faults = [fault.as_json() for fault in read(text, 4, given.steps).faults]
    drawn = random.Random(seed)
    for who, count in (("supervisor", given.supervisor), ("helper", given.helper)):
        steps = drawn.sample(range(2, given.steps), count)
        faults += [{"what": "kill", "who": who, "step": step} for step in steps]
    path = folder / f"faults-{seed}.jsonl"
    path.write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
