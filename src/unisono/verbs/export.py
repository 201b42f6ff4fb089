"""`unisono export RUN --to hf|adapter|onnx|torch|weights|dcp`."""

from pathlib import Path

from unisono.spec.finder import contributed
from unisono.spec.runs import run_folder
from unisono.verbs import CommandCall, Parser, Result, Verb
from unisono.verbs._checkpoint import add_checkpoint_flags


class ExportVerb(Verb):
    """Write a run's weights for other programs."""

    name = "export"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID")
        parser.add_argument(
            "--to",
            choices=("hf", "adapter", "onnx", "torch", "weights", "dcp"),
            default="hf",
            help="hf: a folder for transformers; adapter: LoRA alone, for peft; onnx; torch: a program of torch.export;"
            " weights: a state_dict under the module's own names; dcp: that, optimiser state and step, for FSDP2",
        )
        add_checkpoint_flags(parser)
        parser.add_argument("--out", metavar="DIR", help="where to write (RUN/export-TO)")
        parser.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "float16", "float64"),
            help="of the weights (as trained)",
        )
        parser.add_argument(
            "--prune", metavar="SHARE", help="hf: zero this share of each block's matrices, 0.5, or 2:4"
        )
        parser.add_argument(
            "--quantise", choices=("int8", "int4"), help="hf: the blocks' matrices in so many bits"
        )

    def run(self, call: CommandCall) -> Result:
        args = call.args
        run = run_folder(args.run)
        behind = ("-ema" if args.weights == "ema" else "") + ("-pruned" if args.prune else "")
        behind += f"-{args.quantise}" if args.quantise else ""
        out = Path(args.out) if args.out else run / f"export-{args.to}{behind}"
        if call.settings.dry_run:
            return call.would({"run_dir": str(run), "out": str(out)}, f"would write {out}")
        from unisono.train import export

        result = export.run(
            run,
            to=args.to,
            out=out,
            dtype=args.dtype,
            prune=args.prune,
            quantise=args.quantise,
            which=args.which,
            weights=args.weights,
        )
        call.settings.note(
            f"from {result['checkpoint']}{', the average of its weights' * (args.weights == 'ema')}"
        )
        if "compressed" in result:
            for line in contributed("unisono.train.export.compress").summary(result["compressed"]):
                call.settings.note(line)
        call.settings.say(str(out))
        return result
