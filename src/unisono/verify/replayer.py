"""`unisono verify --replay RUN --step N`: a recorded step once more, on one process. No torch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from unisono import config
from unisono.launch import fork_server
from unisono.launch.fork_server import print_output
from unisono.observe.metrics import read_steps
from unisono.spec.errors import UsageError
from unisono.spec.settings import Settings
from unisono.verify.prover import one_device

ENTRY = "unisono.verify.replay:main"


def run(run_dir: Path, step: int | None, settings: Settings) -> dict[str, Any]:
    """Replay step `step` (from 1, the last recorded one if None) of a run; the object of `--json`.

    Raises UsageError V02 where the run recorded no such step.
    """
    got = config.load(run_dir)
    resolved = config.resolve(got.recipe, got.plan, None, got.origins)
    lines = {line["step"]: line for line in _lines(run_dir) if isinstance(line.get("step"), int)}
    step = _step_of(run_dir, lines, step)
    plan = resolved.plan
    argument = {
        "recipe": resolved.recipe.model_dump_json(exclude_unset=True),
        "plan": str(plan),
        "alone": str(one_device(plan)),
        "step": step,
        "run_dir": str(run_dir),
        "recorded": [
            _with_norm(line, lines.get(n + 1, {})) for n, line in sorted(lines.items()) if n <= step
        ],
    }
    threads = resolved.recipe.launch.threads_per_rank or max(1, _cores(run_dir) // plan.world)
    settings.note(f"replaying step {step} of {run_dir} on one process")

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "from":
            for note in event["notes"]:
                print(f"note  {note}", file=sys.stderr)
        else:
            print_output(rank, event)

    with fork_server.start(ENTRY, 1, settings.quiet) as nursery:
        launch = resolved.recipe.launch
        outcome = nursery.run(argument, 1, threads, hear, None, launch.backend, serves=plan.world)
    result = {"run_dir": str(run_dir), "step": step, "plan": str(plan), **outcome.returned()[0]}
    settings.say("\n".join(_text(result)))
    return {"results": [result], "pass": result["pass"]}


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return read_steps(run_dir / "metrics.jsonl")[0]
    except OSError:
        return []


def _with_norm(line: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A step's line; where its gradients were still on their way when it ended, with the norm that the next one has."""
    late = after.get("grad_norm_before")
    return {**line, "grad_norm": late} if line.get("grad_norm") is None and late is not None else line


def _step_of(run_dir: Path, lines: dict[int, dict[str, Any]], step: int | None) -> int:
    if not lines:
        raise UsageError(
            "the run has recorded no steps",
            where=str(run_dir / "metrics.jsonl"),
            fix="a run of `unisono train` that made a step",
            code="V02",
        )
    wanted = max(lines) if step is None else step
    if wanted not in lines:
        raise UsageError(
            f"the run has recorded no step {wanted}",
            where=str(run_dir / "metrics.jsonl"),
            fix=f"--step between {min(lines)} and {max(lines)}",
            code="V02",
        )
    return wanted


def _cores(run_dir: Path) -> int:
    """Return the cores of the machine that made the run: sums depend on the number of threads."""
    try:
        cores = json.loads((run_dir / "env.json").read_text(encoding="utf-8")).get("cores_usable")
    except (OSError, ValueError):
        cores = None
    return cores if isinstance(cores, int) and cores > 0 else len(os.sched_getaffinity(0))


def _text(result: dict[str, Any]) -> list[str]:
    errors = ", ".join(
        f"{kind} {error:.1e} (bound {result['bounds'][kind]:.1e})"
        for kind, error in result["max_rel_err"].items()
        if error is not None
    )
    many = result["steps_replayed"]
    replayed = f"{many} step{'s' * (many != 1)} from {result['from']}"
    line = f"step {result['step']} of {result['run_dir']} ({result['plan']}), {replayed}"
    saved = f", and the tensors of {result['compared_with']}" if result["compared_with"] else ""
    if result["bit_identical"]:
        return [line, f"the same bits: loss and norm{saved}  ok"]
    out = [line, f"{errors}  {'ok' if result['pass'] else 'FAIL'}"]
    if result["first_divergence"]:
        out.append(f"    first   {result['first_divergence']}")
    return out
