"""`unisono evaluate RUN [--follow]`."""

from collections.abc import Mapping
from typing import Any

from unisono.spec.runs import run_folder
from unisono.train.state import history
from unisono.verbs import CommandCall, Parser, Result, Verb


class EvaluateVerb(Verb):
    """Evaluate a run's newest checkpoint on held-out data, on one process.

    With --follow, also each one that the run saves from now on, until the run has ended.
    """

    name = "evaluate"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID")
        parser.add_argument(
            "--follow", action="store_true", help="wait for more checkpoints, until the run ends"
        )

    def run(self, call: CommandCall) -> Result:
        run = run_folder(call.args.run)
        if call.settings.dry_run:
            return call.would({"run_dir": str(run)}, f"would evaluate the newest checkpoint of {run}")
        from unisono_contrib.train import evaluation

        if not call.args.follow:
            record = evaluation.evaluate_newest(run)
            call.settings.say(in_words(record))
            return {"run_dir": str(run), **record}
        records = []
        for record in evaluation.follow(run, lambda: history.ended(run)):
            call.settings.say(in_words(record))
            records.append(record)
        return {"run_dir": str(run), "evaluations": records}


def in_words(record: Mapping[str, Any]) -> str:
    """`step 200  val_loss 4.1234`."""
    numbers = (f"{name} {value:.4f}" for name, value in record.items() if name.startswith("val_"))
    return "  ".join([f"step {record['step']}", *numbers])
