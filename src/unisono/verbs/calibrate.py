"""`unisono calibrate`."""

import sys
from pathlib import Path

from unisono.verbs import CommandCall, Parser, Result, Verb


class CalibrateVerb(Verb):
    """Measure this machine in about half a minute, for plan, simulate, plan=auto and reports."""

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

        def tick(share: float) -> None:
            if not call.settings.quiet and sys.stderr.isatty():
                bar = f"{'█' * round(30 * share):<30}"
                print(
                    f"\r{bar} {share:4.0%}", end="\r\033[K" if share == 1 else "", file=sys.stderr, flush=True
                )

        def note(text: str) -> None:
            call.settings.note(f"\r\033[K{text}" if sys.stderr.isatty() else text)

        result = calibrate.run(out, note, tick)
        call.settings.say(str(out))
        return result
