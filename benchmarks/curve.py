"""One recipe, one rank and several: the loss curves side by side, and by how much they differ.

    python benchmarks/curve.py --recipe examples/nanogpt_cpu.toml
    python benchmarks/curve.py --steps 200 --plans "dp=1" "dp=2" "shard=2"

The recipe is run as it stands under each plan; other flags (`--data.source text:my.txt`, `--train.dtype float64`)
are handed to `unisono train`. The first plan is the one that the others are held to. Equal means: equal up to the
order of additions, whose rounding errors grow while a model trains; in float64 they stay below a billionth.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    options, more = arguments()
    with tempfile.TemporaryDirectory() as folder:
        runs = {plan: train(plan, folder, options, more) for plan in options.plans}
    reference, *others = options.plans
    rows = [compare(plan, runs[plan], runs[reference]) for plan in others]
    if options.json:
        print(
            json.dumps({"schema_version": 1, "recipe": options.recipe, "reference": reference, "rows": rows})
        )
        return 0
    curve = runs[reference]["losses"]
    print(
        f"{options.recipe or 'the demo'}, {len(curve)} steps; the loss of every step beside that of {reference}"
    )
    for row in rows:
        print(
            f"{row['plan']}: largest relative difference {row['largest']:.1e} (step {row['at']}),"
            f" median {row['median']:.1e}, first 100 steps {row['first_100']:.1e}; last loss {row['last']:.4f}"
            f" and {curve[-1]:.4f}; validation {row['val']:.4f} and {runs[reference]['val']:.4f}"
        )
    return 0


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", help="a recipe file (default: the demo)")
    parser.add_argument("--plans", nargs="+", default=["dp=1", "dp=2"], help="default: dp=1 dp=2")
    parser.add_argument("--steps", type=int, help="fewer or more than the recipe says")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    return parser.parse_known_args()


def train(plan: str, folder: str, options: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """The losses of one run."""
    command = [sys.executable, "-m", "unisono", "train", *([options.recipe] if options.recipe else [])]
    command += ["--plan", plan, "--out.dir", folder, "--out.report", "false", "--json", *more]
    command += ["--train.steps", str(options.steps)] if options.steps else []
    print(f"== {plan}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    summary = json.loads(done.stdout)
    lines = (Path(summary["run_dir"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"losses": [json.loads(line)["loss"] for line in lines], "val": summary["val_loss"]}


def compare(plan: str, run: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Relative differences of the losses, step by step."""
    pairs = zip(run["losses"], reference["losses"], strict=True)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return {
        "plan": plan,
        "steps": len(differences),
        "largest": max(differences),
        "at": differences.index(max(differences)),
        "median": sorted(differences)[len(differences) // 2],
        "first_100": max(differences[:100]),
        "last": run["losses"][-1],
        "last_reference": reference["losses"][-1],
        "val": run["val"] if run["val"] is not None else float("nan"),
        "val_reference": reference["val"],
    }


if __name__ == "__main__":
    sys.exit(main())
