"""`unisono ask RUN "why slow at 02:10?"`."""

from unisono.spec.runs import run_folder
from unisono.verbs import CommandCall, Parser, Result, Verb


class AskVerb(Verb):
    """Say what limited a run at a time, at a step or on a rank: the verdict, what to change, and what that would gain.

    A question is read by its keywords: a time (02:10, 2026-03-01 02:10:30), `step 812`, `steps 100 to 200`, `since`,
    `until`, `rank 3`, `now`. Without one of them the answer is about the whole run, and says so.
    """

    name = "ask"
    epilog = 'unisono ask runs/demo "why slow at step 40?" --json'

    def flags(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME/ID")
        parser.add_argument(
            "question", nargs="?", default="", metavar='"..."', help="what to look at (the whole run)"
        )

    def run(self, call: CommandCall) -> Result:
        run = run_folder(call.args.run)
        if call.settings.dry_run:
            return call.would({"run_dir": str(run)}, f"would judge {run}")
        from unisono.report.collect import collect
        from unisono.report.verdict.gather import gather
        from unisono.report.verdict.judge import as_json, in_words, judge
        from unisono.verbs._prices import prices_of
        from unisono_contrib.report import questions

        record = collect(run)
        question = questions.read(call.args.question, gather(record, window=(0, 1 << 62)))
        evidence = gather(record, question.window)
        verdict = judge(evidence, prices_of(run, call.environ))
        beside = questions.beside(evidence, question.rank)
        call.settings.say(f"about  {question.said}")
        call.settings.say(in_words(verdict))
        for row in beside:
            call.settings.say(row)
        return {
            "run_dir": str(run),
            "question": call.args.question,
            "understood": question.understood,
            "about": question.said,
            "window": list(question.window or verdict.steps),
            **as_json(verdict),
            "beside": beside,
            "missing": list(record.missing),
        }
