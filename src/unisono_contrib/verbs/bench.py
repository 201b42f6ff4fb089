"""`unisono bench`: its flags here, what is measured in `measure.benches`, one bench a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.spec.errors import UsageError
from unisono.spec.settings import Settings
from unisono.verbs import CommandCall, Parser, Result, Verb

if TYPE_CHECKING:
    from unisono_contrib.measure.benches import Bench


class BenchVerb(Verb):
    """Measure this machine, beside its peers: collectives, codecs, net.

    All that is compared runs in the same processes in turns; ratios are medians over turns. Under torchrun, Slurm or
    unisono lab the ranks that are there take part; else they are started on this machine.

    --against measures two versions in turns, or one beside what was saved; exit code 7: it is slower now.
    """

    name = "bench"
    failed = 7
    epilog = (
        "unisono bench collectives --ranks 4 --sizes 4KiB,16MiB     more flags: unisono bench collectives --help\n"
        "unisono bench codecs --out codecs.svg\n"
        "unisono lab --hosts 2 --rate 100mbit -- unisono bench net --json"
    )

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "what", nargs="?", metavar="WHAT", help="what is measured: collectives, codecs, net"
        )
        parser.add_argument("--ranks", type=int, metavar="N", help="how many to start on this machine")
        parser.add_argument(
            "--seconds",
            type=float,
            default=0.3,
            metavar="S",
            help="about how long, of each line of the table (0.3)",
        )
        parser.add_argument("--out", metavar="FILE", help="draw it: FILE.svg or FILE.png")
        parser.add_argument(
            "--save", metavar="NAME", help="keep five repeats in bench-history/NAME.json, or in a FILE.json"
        )
        parser.add_argument(
            "--against", metavar="WHAT",
            help="is it slower now? the folder of another checkout: both in turns; or a NAME that was saved",
        )  # fmt: skip

    def help(self, words: Sequence[str]) -> str:
        return self._parser_for(words).format_help()

    def read(self, words: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> CommandCall:
        args = self._parser_for(words).read(words)
        args.words = list(words)
        return CommandCall(settings, args, environ)

    def _parser_for(self, words: Sequence[str]) -> Parser:
        """With the flags of the bench that is asked for, if one is."""
        from unisono_contrib.measure.benches import BENCHES

        parser = self.parser()
        name = next((word for word in words if word in BENCHES.names() or ".py:" in word), None)
        if name is not None:
            BENCHES.find(name)().flags(parser.add_argument_group(name))
        return parser

    def run(self, call: CommandCall) -> Result:
        from unisono_contrib.measure.benches import BENCHES

        args = call.args
        if args.what is None:
            known = " ".join(BENCHES.names())
            raise UsageError("nothing says what to measure", where="unisono bench",
                             fix=f"unisono bench WHAT, one of: {known}", code="C04")  # fmt: skip
        bench = BENCHES.find(args.what, "unisono bench")()
        if args.out is not None and Path(args.out).suffix not in (".png", ".svg"):
            raise UsageError(
                f"--out {args.out}: pictures are .png or .svg", where="--out",
                fix=f"--out {Path(args.out).with_suffix('.svg')}", code="C04",
            )  # fmt: skip
        from unisono.launch import env

        place = env.detect(call.environ)
        ranks = place.world if place is not None else args.ranks or bench.ranks
        if ranks < bench.ranks:
            raise UsageError(
                f"bench {bench.name} needs {bench.ranks} ranks or more", where="--ranks",
                fix=f"--ranks {bench.ranks}", code="C02",
            )  # fmt: skip
        question = {**bench.ask(args, ranks), "seconds": args.seconds}
        if call.settings.dry_run:
            return call.would(
                {"bench": bench.name, "ranks": ranks, **question}, f"would measure {bench.about}"
            )
        if args.save is not None or args.against is not None:
            if place is not None or args.out is not None:
                raise UsageError("--save and --against start ranks of their own, and draw nothing",
                                 where="unisono bench", fix="the same without a starter and without --out",
                                 code="C04")  # fmt: skip
            return _remembered(call, bench.name)
        return _measured(call, bench, ranks, question)


def _remembered(call: CommandCall, bench: str) -> Result:
    """Measure in processes of their own, and keep it, or compare it with what was before."""
    from unisono_contrib.measure import history

    args, note, words = call.args, call.settings.note, _plain_words(call.args.words)
    source = history.own_source()
    other = history.source_of(args.against) if args.against is not None else None
    kept = history.saved(history.file_of(args.against), words) if args.against and other is None else None
    results = []
    if other is None or args.save is not None:
        for repeat in range(history.REPEATS):
            results.append(history.measured(source, words, call.environ))
            note(f"repeat {repeat + 1} of {history.REPEATS}")
    facts: dict[str, object] = {"bench": bench}
    if args.save is not None:
        path = history.file_of(args.save)
        try:
            history.save(path, bench, words, results)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}", where="--save",
                             fix="--save FILE.json elsewhere", code="E02") from error  # fmt: skip
        call.settings.say(str(path))
        facts["saved"] = str(path)
    if args.against is None:
        return facts
    if kept is not None:
        machines = [
            {**machine, "load": 0, "date": ""} for machine in (kept["machine"], results[0]["machine"])
        ]
        if machines[0] != machines[1]:
            raise UsageError(f"{args.against} was measured on another machine: {kept['machine']['host']}",
                             where="--against", fix="--against a checkout of the other version",
                             code="C06")  # fmt: skip
        note("note  what was saved is of another time: how the machine changed since cannot be taken out, and the"
             " intervals are wider by 10 %; --against CHECKOUT measures both in turns")  # fmt: skip
        differences = history.since(kept["repeats"], [history.times_of(result) for result in results])
    else:
        times = lambda folder: history.times_of(history.measured(folder, words, call.environ))
        differences = history.beside(lambda: times(other), lambda: times(source), note)
    for line in history.lines(differences):
        call.settings.say(line)
    return {**facts, "against": args.against, "in_turns": kept is None, **history.described(differences)}


def _plain_words(words: Sequence[str]) -> list[str]:
    """The words that say what is measured: without the flags that are about keeping, comparing and showing."""
    left, plain = iter(words), list[str]()
    for word in left:
        if word in ("--save", "--against"):
            next(left, None)
        elif word not in ("--json", "--quiet", "--no-color") and not word.startswith(
            ("--save=", "--against=")
        ):
            plain.append(word)
    return plain


def _measured(call: CommandCall, bench: "Bench", ranks: int, question: Mapping[str, object]) -> Result:
    from unisono_contrib.measure import bench as supervisor

    result = supervisor.run(bench, question, ranks, call.settings, call.environ)
    if result is None:
        return None
    for line in bench.table(result["rows"]):
        call.settings.say(line)
    if call.args.out is not None:
        try:
            call.settings.note(str(supervisor.draw(bench, result, Path(call.args.out))))
        except OSError as error:
            raise UsageError(
                f"cannot write {call.args.out}: {error.strerror}", where="--out", fix="--out FILE.svg elsewhere",
                code="E02",
            ) from error  # fmt: skip
    return result
