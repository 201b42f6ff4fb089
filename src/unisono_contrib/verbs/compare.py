"""`unisono compare RUN RUN ...`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UsageError
from unisono.spec.runs import CHECKPOINTS
from unisono.spec.settings import Settings
from unisono.verbs import CommandCall, Parser, Result, Verb

if TYPE_CHECKING:
    from unisono_contrib.report.compare import StepMap

_SUFFIXES = (".html", ".png", ".svg")


class CompareVerb(Verb):
    """Draw several runs in one picture, and name the first step in which they differ in bits.

    The first run is the baseline: the others are compared by the time and the bytes that they take to its last loss.
    Runs that are still going are taken as far as they are.
    """

    name = "compare"
    epilog = "unisono compare runs/a/ID runs/b/ID runs/c/ID --out abc.html"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, runs/NAME/ID; two or more")
        parser.add_argument(
            "--out", metavar="FILE",
            help="FILE.html, with FILE.png beside it, or FILE.png or FILE.svg alone (compare.html in the first run)",
        )  # fmt: skip

    def run(self, call: CommandCall) -> Result:
        args, settings = call.args, call.settings
        if args.out is not None and Path(args.out).suffix not in _SUFFIXES:
            raise UsageError(
                f"--out {args.out}: pages are .html, pictures .png or .svg", where="--out",
                fix="--out FILE.html", code="C04",
            )  # fmt: skip
        from unisono_contrib.report import compare
        from unisono_contrib.report.dash import static

        comparison = compare.gather(args.runs)
        out = Path(args.out) if args.out is not None else comparison.baseline.record.folder / "compare.html"
        if settings.dry_run:
            names = ", ".join(run.name for run in comparison.runs)
            return call.would({"out": str(out)}, f"would compare {names} and write {out}")
        facts = compare.facts(comparison, _states)
        try:
            files = static.write(comparison, facts, out)
        except OSError as error:
            raise UsageError(
                f"cannot write {out}: {error.strerror}", where="--out", fix="--out FILE.html elsewhere", code="E02"
            ) from error  # fmt: skip
        _say(settings, facts, files)
        return {**facts, "files": [str(file) for file in files]}


def _states(a: Path, b: Path, step_beside: "StepMap") -> dict[str, Any]:
    """Compare checkpoints, which takes torch; runs that keep none do without."""
    if not all(any((folder / CHECKPOINTS).glob("step-*")) for folder in (a, b)):
        return {"compared": [], "first": None, "unread": []}
    from unisono_contrib.train.state.checkpoint.differ import compare_runs

    return compare_runs(a, b, step_beside)


def _say(settings: Settings, facts: dict[str, Any], files: list[Path]) -> None:
    """The files, the sentence on top, the tables, and where bits differ."""
    from unisono.planner.formatting import Column, table
    from unisono_contrib.report import compare_words as said

    def lines(heads: tuple[str, ...], rows: list[list[str]]) -> list[str]:
        columns = [Column(head, str(i)) for i, head in enumerate(heads)]
        return table(columns, [{str(i): cell for i, cell in enumerate(row)} for row in rows])

    name, plan, *figures = said.HEADS
    settings.say(f"{files[0]}" + (f"  (and {files[1].name})" if files[1:] else ""))
    settings.say(said.headline(facts))
    for line in lines((name, *figures, plan), [[row[0], *row[2:], row[1]] for row in said.rows(facts)]):
        settings.say(line)
    for line in (said.footnote(facts), *said.sentences(facts)):
        settings.say(line)
    if facts["differences"]:
        for line in lines(("key", *said.names(facts)), said.key_rows(facts)):
            settings.say(line)
    for line in said.notes(facts):
        settings.note(f"note  {line}")
