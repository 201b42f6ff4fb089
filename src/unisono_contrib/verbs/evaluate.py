"""`unisono evaluate RUN [RUN ...] [--follow] [--lm-eval TASK,...]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.spec.runs import run_folder
from unisono.train.state import history
from unisono.verbs import CommandCall, Parser, Result, Verb
from unisono.verbs._checkpoint import add_checkpoint_flags


class EvaluateVerb(Verb):
    """Evaluate a run's newest or best checkpoint on held-out data, or several runs' as an ensemble, on one process.

    Of several runs the probabilities are averaged; NLL, accuracy and calibration error are of each and of the mean.
    With --follow, also each checkpoint that the run saves from now on, until the run has ended.
    With --lm-eval, on tasks of lm-evaluation-harness instead of held-out data.
    """

    name = "evaluate"
    epilog = "unisono evaluate runs/seeds/trial-*"

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "runs", nargs="+", metavar="RUN", help="run folder, runs/NAME/ID; several: an ensemble"
        )
        parser.add_argument(
            "--calibration", action="store_true", help="of one run too: NLL, accuracy and calibration error"
        )
        add_checkpoint_flags(parser)
        parser.add_argument(
            "--follow", action="store_true", help="wait for more checkpoints, until the run ends"
        )

        parser.add_argument(
            "--lm-eval",
            metavar="TASK,...",
            help="tasks of lm-evaluation-harness, in the place of held-out data",
        )
        parser.add_argument(
            "--lm-eval-tasks", metavar="DIR", help="folder with tasks of your own for --lm-eval, as YAML"
        )
        parser.add_argument(
            "--shots", metavar="N", type=int, help="examples before each question of --lm-eval (the task's)"
        )
        parser.add_argument("--limit", metavar="N", type=int, help="samples of each task of --lm-eval (all)")

    def run(self, call: CommandCall) -> Result:
        if call.args.lm_eval is not None:
            return _on_tasks(call)
        runs, averaged = [run_folder(path) for path in call.args.runs], call.args.calibration
        run, several = runs[0], len(runs) > 1
        if call.args.follow and (several or averaged):
            raise UsageError("--follow watches one run", where="--follow", fix="unisono evaluate RUN --follow",
                             code="C04")  # fmt: skip
        which, weights = call.args.which, call.args.weights
        for flag, odd in (("--which", which == "best"), ("--weights", weights == "ema")):
            if call.args.follow and odd:
                raise UsageError("--follow evaluates each new checkpoint as it was trained",
                                 where=f"--follow, {flag}", fix="one of the two", code="C04")  # fmt: skip
        if call.settings.dry_run:
            names = " and ".join(map(str, runs))
            facts = {"run_dirs": [*map(str, runs)]} if several else {"run_dir": str(run)}
            return call.would(
                facts, f"would evaluate the {'newest' if which == 'latest' else which} checkpoint of {names}"
            )
        from unisono_contrib.train import evaluation

        if several or averaged:
            return _ensemble(call, evaluation.evaluate_ensemble(runs, which, weights))
        if not call.args.follow:
            record = evaluation.evaluate_one(run, which, weights)
            call.settings.say(in_words(record))
            return {"run_dir": str(run), **record}
        records = []
        for record in evaluation.follow(run, lambda: history.ended(run)):
            call.settings.say(in_words(record))
            records.append(record)
        return {"run_dir": str(run), "evaluations": records}


def _on_tasks(call: CommandCall) -> Result:
    """The numbers of each task of lm-evaluation-harness, a line a task."""
    args = call.args
    tasks = [task for task in args.lm_eval.split(",") if task]
    if len(args.runs) > 1 or args.follow or args.calibration or not tasks:
        raise UsageError("--lm-eval evaluates one checkpoint on tasks", where="--lm-eval", code="C04",
                         fix="unisono evaluate RUN --lm-eval TASK,TASK")  # fmt: skip
    run = run_folder(args.runs[0])
    if call.settings.dry_run:
        return call.would(
            {"run_dir": str(run), "tasks": tasks}, f"would evaluate {run} on {', '.join(tasks)}"
        )
    from unisono_contrib.train import harness

    folder = None if args.lm_eval_tasks is None else Path(args.lm_eval_tasks)
    said = harness.evaluate_tasks(run, tasks, args.which, folder, args.shots, args.limit)
    for task, values in said["tasks"].items():
        call.settings.say("  ".join([task, *(f"{name} {value:.4f}" for name, value in values.items())]))
    return {"run_dir": str(run), **said}


def _ensemble(call: CommandCall, said: Mapping[str, Any]) -> Result:
    """The table of all members and of their mean."""
    from unisono.planner.formatting import Column, table
    from unisono.spec.words import number

    rows = [
        *said["members"],
        *([{"run_dir": "mean of all", **said["ensemble"]}] if len(said["members"]) > 1 else []),
    ]
    columns = [
        Column("run", "run_dir"),
        Column("step", "step"),
        *(Column(k, k, number) for k in ("nll", "accuracy", "ece")),
    ]
    for line in table(columns, rows):
        call.settings.say(line)
    return said


def in_words(record: Mapping[str, Any]) -> str:
    """`step 200  val_loss 4.1234`."""
    numbers = (f"{name} {value:.4f}" for name, value in record.items() if name.startswith("val_"))
    return "  ".join([f"step {record['step']}", *numbers])
