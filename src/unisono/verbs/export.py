"""`unisono export RUN --to hf`."""

from pathlib import Path

from unisono.spec.runs import run_folder
from unisono.verbs import CommandCall, Parser, Result, Verb


class ExportVerb(Verb):
    """Write a run's weights for other programs."""

    name = "export"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID")
        parser.add_argument(
            "--to", choices=("hf",), default="hf", help="hf: safetensors and config for transformers"
        )
        parser.add_argument("--out", metavar="DIR", help="where to write (RUN/export-hf)")

    def run(self, call: CommandCall) -> Result:
        args = call.args
        run = run_folder(args.run)
        out = Path(args.out) if args.out else run / f"export-{args.to}"
        if call.settings.dry_run:
            return call.would({"run_dir": str(run), "out": str(out)}, f"would write {out}")
        from unisono.train import export

        result = export.run(run, to=args.to, out=out)
        call.settings.note(f"from {result['checkpoint']}")
        call.settings.say(str(out))
        return result
