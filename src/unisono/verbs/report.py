"""`unisono report RUN`."""

from unisono.spec.runs import run_folder
from unisono.verbs import CommandCall, Parser, Result, Verb


class ReportVerb(Verb):
    """Draw where a run's time and bytes went: report.html and report.png in its folder."""

    name = "report"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID")

    def run(self, call: CommandCall) -> Result:
        run = run_folder(call.args.run)
        if call.settings.dry_run:
            lines = f"would write {run / 'report.html'} and {run / 'report.png'}"
            return call.would({"run_dir": str(run)}, lines)
        from unisono.report import page
        from unisono.verbs._prices import prices_of

        result = page.run(run, prices_of(run, call.environ))
        call.settings.say(f"{result['report_html']}  (and report.png)")
        call.settings.say(result["verdict"])
        if best := result["best"]:
            values = (f"{key} {value}" for key, value in best.items() if value is not None)
            call.settings.say(f"best checkpoint: {', '.join(values)}")
        if result["early"]:
            call.settings.say(result["early"])
        call.settings.say(result["advice"])
        for line in [*result["mfu_words"], *([result["lengths"]["says"]] if result["lengths"] else ())]:
            call.settings.say(line)
        for what in result["missing"]:
            call.settings.note(f"note  {what}")
        return result
