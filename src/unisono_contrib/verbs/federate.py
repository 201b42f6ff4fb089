"""`unisono federate FILE`: its flags here, the run in `federated.play`."""

from pathlib import Path
from typing import TYPE_CHECKING

from unisono.spec.runs import CONFIG
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded
from unisono.verbs.train import resumed

if TYPE_CHECKING:
    from unisono.config import Loaded, Resolved


class FederateVerb(RecipeVerb):
    """Train one model across clients that keep their data, in rounds.

    The recipe's [federated] section says how many clients there are, which of them train in a round, on which samples,
    and what the server makes of what they send. Without --serve all clients are simulated in this process.
    """

    name = "federate"

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.add_argument(
            "--resume", metavar="RUN", help="continue the run in this folder, or from this checkpoint of it"
        )

    def run(self, call: CommandCall) -> Result:
        args, file = call.args, call.args.file
        resume, checkpoint = resumed(args.resume) if args.resume is not None else (None, "")
        if resume is not None and file is None:
            file = str(resume / CONFIG)
        resolved = resolved_for_clients(loaded(call, file, demo=args.demo))
        if call.settings.dry_run:
            return _would_federate(call, resolved)
        from unisono.config import resolved_toml
        from unisono.verbs.train.folder import make_run_dir
        from unisono_contrib.federated import play

        run_dir = resume or make_run_dir(resolved.recipe, resolved_toml(resolved))
        record = play.play(resolved, run_dir, resume is not None, checkpoint, call.settings.note)
        call.settings.say(play.in_words(record))
        return record


def resolved_for_clients(recipe: "Loaded") -> "Resolved":
    """The recipe as clients play it: a local step is one micro-batch, and what counts in steps counts in rounds. Raises
    ConfigProblems."""
    from unisono import config
    from unisono.spec.errors import ConfigProblems
    from unisono_contrib.config.sections.federated import problems_of

    section, train = recipe.recipe.federated, recipe.recipe.train
    if problems := list(problems_of(recipe.recipe, recipe.plan)):
        raise ConfigProblems(problems)
    steps = {"steps": section.rounds, "micro_batch": train.global_batch}
    as_rounds = recipe.recipe.model_copy(update={"train": train.model_copy(update=steps)})
    origins = {**recipe.origins, "train.steps": "derived: federated.rounds"}
    return config.resolve(as_rounds, recipe.plan, 1, origins)


def _would_federate(call: CommandCall, resolved: "Resolved") -> Result:
    from unisono.config import as_json, resolved_toml

    recipe = resolved.recipe
    section = recipe.federated
    lines = [
        resolved_toml(resolved),
        f"would train  {recipe.name}, {section.rounds} rounds of {section.clients} clients, {section.strategy}",
        f"out          {Path(recipe.out.dir, recipe.name)}",
    ]
    return call.would({"recipe": as_json(recipe), "origins": resolved.origins}, *lines)
