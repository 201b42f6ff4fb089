"""`unisono dash RUN`: a run in the browser while it goes on."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.spec.runs import run_folder
from unisono.verbs import CommandCall, Parser, Result, Verb

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class DashVerb(Verb):
    """Watch a run in the browser: who is late and why, where time and bytes go, logs, what if.

    The page shows a run while it goes on, and one that has ended. Several runs stand beside each other, with the first
    step in which their bits differ. Nothing leaves this machine, and only who has the printed address is answered.
    """

    name = "dash"
    epilog = (
        "unisono dash runs/demo        then open the address that it prints; Ctrl-C ends it, the run goes on"
    )

    def flags(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, runs/NAME/ID")
        parser.add_argument(
            "--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)"
        )
        parser.add_argument(
            "--port",
            type=_port,
            metavar="N",
            help="port to listen on; 0: any (the last one of these runs, or any)",
        )
        parser.add_argument(
            "--no-token", action="store_true", help="answer everybody on this machine; only on 127.0.0.1"
        )

    def run(self, call: CommandCall) -> Result:
        args = call.args
        if args.no_token and args.host not in _LOOPBACK:
            raise UsageError(
                f"--no-token on {args.host} would show the runs to everybody who reaches this host",
                where="--no-token", fix="--host 127.0.0.1, or no --no-token", code="C04",
            )  # fmt: skip
        folders = [run_folder(path) for path in args.runs]
        if len({folder.resolve() for folder in folders}) < len(folders):
            raise UsageError("a run is named twice", where="unisono dash", fix="each run once", code="C04")
        if call.settings.dry_run:
            names = ", ".join(map(str, folders))
            return call.would({"runs": [*map(str, folders)]}, f"would show {names} on {args.host}")
        return _serve(call, folders)


def _serve(call: CommandCall, folders: Sequence[Path]) -> Result:
    try:
        from unisono_contrib.report.dash import serve
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the dash takes {error.name}, which is not installed", where="unisono dash",
            fix="pip install 'unisono[dash]'", code="E01",
        ) from None  # fmt: skip
    from unisono_contrib.report.dash.live import LiveRuns
    from unisono_contrib.verbs import _whatif as whatif

    live = LiveRuns(folders, _prices(folders, call.environ))
    args, settings = call.args, call.settings
    place = serve.ListenPlace(args.host, args.port, not args.no_token, call.environ)

    def price(at: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        run = whatif.WhatIf(int(wanted["ranks"]), float(wanted["link"]), int(wanted["batch"]))
        return whatif.answer(folders[at], run, live.step_s(at), call.environ)

    live.whatif = [whatif.choices(folder, call.environ) for folder in folders]
    return serve.run(live, place, price, settings)


def _prices(folders: Sequence[Path], environ: Mapping[str, str]) -> list[Any]:
    from unisono.verbs._prices import prices_of

    return [prices_of(folder, environ) for folder in folders]


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)
