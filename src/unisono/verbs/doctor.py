"""`unisono doctor`."""

from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.verbs import CommandCall, Parser, Result, Verb


class DoctorVerb(Verb):
    """Look over this machine, ask a run that is alive whether it hangs, or explain the log of one that failed."""

    name = "doctor"
    failed = 4
    epilog = """unisono doctor                        look over this machine
unisono doctor hang runs/NAME/ID      ask all ranks of a run where they stand, from any host that has the folder
unisono doctor hang                   the one loop of your own that is alive on this host and has no folder;
unisono doctor hang PID               or that of this process
unisono doctor explain LOG            why a run failed: by a log, a folder of logs, runs/NAME/ID or -"""

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "what", nargs="*", metavar="hang RUN | explain LOG", help="a run that is alive, or a log"
        )
        parser.add_argument(
            "--patience", type=float, metavar="SECONDS",
            help="with hang: how long ranks may keep others waiting (20 of the run's steps, and 5 s)",
        )  # fmt: skip

    def run(self, call: CommandCall) -> Result:
        what, patience = call.args.what, call.args.patience
        if what[:1] == ["hang"] and len(what) <= 2:
            return _hang(call, what[1] if len(what) == 2 else "", patience)
        if what[:1] == ["explain"] and len(what) == 2 and patience is None:
            return _explain(call, what[1])
        if what == ["explain"]:
            raise UsageError(
                "which log", where="unisono doctor explain", fix="unisono doctor explain FILE", code="C04"
            )
        if what and patience is None:
            odd = what[2] if what[0] in ("hang", "explain") else what[0]
            raise UsageError(
                f"unknown argument {odd}", where="unisono doctor", fix="unisono doctor", code="C04"
            )
        if patience is not None:
            fix = "unisono doctor hang RUN --patience SECONDS"
            raise UsageError("--patience goes with hang", where="unisono doctor", fix=fix, code="C04")
        if call.settings.dry_run:
            sights = "Python, torch, cores, memory, disk, loopback, transport, port, a sum of two ranks, backend, clock"
            return call.would({}, f"would look at: {sights}")
        from unisono.launch import doctor

        return doctor.run(quiet=call.settings.quiet)


def _hang(call: CommandCall, run: str, patience: float | None) -> Result:
    from unisono.launch import doctor_hang, inspect_folder

    if patience is not None and not patience > 0:
        raise UsageError(f"--patience {patience:g}: more than 0 seconds", where="unisono doctor hang",
                         fix="--patience 10", code="C02")  # fmt: skip
    folder = doctor_hang.find(run) if run else doctor_hang.only_one()
    if call.settings.dry_run:
        ranks = [rank for rank in inspect_folder.living(folder) if not rank.has_gone()]
        where = ", ".join(f"{rank.rank} (process {rank.pid} on {rank.host})" for rank in ranks)
        return call.would({"run": str(folder)}, f"would ask ranks {where}" if ranks else "no rank is alive")
    facts, lines = doctor_hang.run(folder, patience)
    for line in lines:
        call.settings.say(line)
    return facts


def _explain(call: CommandCall, log: str) -> Result:
    if call.settings.dry_run:
        return call.would({"log": log}, f"would read {log}")
    facts, lines = contributed("unisono.launch.explain").run(log)
    for line in lines:
        call.settings.say(line)
    return facts
