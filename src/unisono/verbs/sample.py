"""`unisono sample RUN`."""

from pathlib import Path

from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.runs import run_folder
from unisono.verbs import CommandCall, Parser, Result, Verb


class SampleVerb(Verb):
    """Draw text, or pictures, from a run's model, on one process."""

    name = "sample"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID, or one of its checkpoints")
        parser.add_argument("--prompt", metavar="TEXT", default="", help="what the text begins with")
        parser.add_argument("--tokens", metavar="N", type=int, default=200, help="how many to draw (200)")
        parser.add_argument(
            "--temperature",
            metavar="T",
            type=float,
            default=0.8,
            help="of the softmax; 0 takes the likeliest (0.8)",
        )
        parser.add_argument("--seed", metavar="N", type=int, help="of the draws (the recipe's)")
        parser.add_argument(
            "--pictures", metavar="N", type=int, default=10, help="of a dit: how many to draw (10)"
        )
        parser.add_argument(
            "--euler-steps", metavar="N", type=int, default=50, help="of a dit: from noise to picture (50)"
        )
        parser.add_argument(
            "--guidance", metavar="W", type=float, default=2.0,
            help="of a dit: weight of the class; 1 does not exaggerate it (2)",
        )  # fmt: skip

    def run(self, call: CommandCall) -> Result:
        args = call.args
        for flag, value in (("--tokens", args.tokens), ("--temperature", args.temperature)):
            if not value >= 0:  # nor nan
                raise UsageError(
                    f"{flag} {value} is below zero", where="unisono sample", fix=f"{flag} 1", code="C04"
                )
        for flag, value in (("--pictures", args.pictures), ("--euler-steps", args.euler_steps)):
            if value < 1:
                raise UsageError(
                    f"{flag} {value}: at least one", where="unisono sample", fix=f"{flag} 1", code="C04"
                )
        path = Path(args.run)
        checkpoint = path if (path / "manifest.json").is_file() else None
        run = path.parents[1] if checkpoint else run_folder(path)
        if call.settings.dry_run:
            return call.would(
                {"run_dir": str(run)}, f"would draw {args.tokens} tokens from {checkpoint or run}"
            )
        from unisono import config

        if config.load(run).recipe.model.draws:
            return _pictures(call, run, checkpoint)
        call.settings.note(f"drawing {args.tokens} tokens (importing torch) ...")
        from unisono.train import sample

        drawn = sample.from_run(run, checkpoint, args.prompt, args.tokens, args.temperature, args.seed)
        call.settings.say(drawn["text"])
        return drawn


def _pictures(call: CommandCall, run: Path, checkpoint: Path | None) -> Result:
    args = call.args
    call.settings.note(f"drawing {args.pictures} pictures (importing torch) ...")
    from unisono.train.export import checkpoint_of

    drawing = contributed("unisono.train.drawing")
    drawn = drawing.from_run(
        run, checkpoint or checkpoint_of(run), args.pictures, args.euler_steps, args.guidance, args.seed
    )
    call.settings.say(drawn["picture"])
    return drawn
