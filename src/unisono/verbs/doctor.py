"""`unisono doctor`."""

from unisono.spec.errors import UsageError
from unisono.verbs import CommandCall, Parser, Result, Verb


class DoctorVerb(Verb):
    """Look over this machine, and say what to do."""

    name = "doctor"
    failed = 4

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "what", nargs="*", metavar="hang RUN", help="(not yet in this version: look into a hang)"
        )

    def run(self, call: CommandCall) -> Result:
        what = call.args.what
        if what[:1] == ["hang"]:
            raise UsageError(
                "doctor hang is not yet in this version", where="unisono doctor hang", fix="unisono doctor",
                code="C10",
            )  # fmt: skip
        if what:
            raise UsageError(
                f"unknown argument {what[0]}", where="unisono doctor", fix="unisono doctor", code="C04"
            )
        if call.settings.dry_run:
            sights = "Python, torch, cores, memory, disk, loopback, transport, port, a sum of two ranks, backend, clock"
            return call.would({}, f"would look at: {sights}")
        from unisono.launch import doctor

        return doctor.run(quiet=call.settings.quiet)
