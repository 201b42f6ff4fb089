"""`unisono calibrate`."""

from pathlib import Path

from unisono.verbs import CommandCall, Parser, Result, Verb


class CalibrateVerb(Verb):
    """Measure this machine in less than two minutes, for plan, simulate, plan=auto and reports."""

    name = "calibrate"

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "--out", metavar="FILE", help="where to write it (~/.cache/unisono/cluster.toml, where all look)"
        )

    def run(self, call: CommandCall) -> Result:
        from unisono.planner.predict import calibration

        out = Path(call.args.out) if call.args.out else calibration(call.environ)
        if call.settings.dry_run:
            return call.would({"file": str(out)}, f"would measure this machine and write {out}")
        from unisono.measure import calibrate

        result = calibrate.run(out, call.settings.note)
        call.settings.say(str(out))
        return result
