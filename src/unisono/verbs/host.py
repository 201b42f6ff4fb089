"""`unisono host DOOR`: lend this host to a run whose supervisor is on another one."""

import json
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

from unisono.spec.doubtful import TEXT, read_text
from unisono.spec.errors import UsageError
from unisono.verbs import CommandCall, Parser, Result, Verb


class HostVerb(Verb):
    """Lend this host to a run that was started elsewhere with --hosts.

    The run's folder tells where to join, and the run's token: only its owner can read it. Ranks are started here as the
    run needs them; when it is cut off, they end, and this host calls again. It leaves when the run is over.
    """

    name = "host"
    epilog = "unisono host runs/mine/20261124-101502-9f3b --ranks 4\nunisono host - < door.json"

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "door", metavar="RUN", help="the run's folder, a file door.json, or - for that as input"
        )
        parser.add_argument("--ranks", type=int, metavar="N", help="ranks that this host takes (one a core)")
        parser.add_argument("--name", metavar="NAME", help="of this host, among those of the run (its own)")
        parser.add_argument(
            "--patience",
            type=float,
            default=60.0,
            metavar="S",
            help="seconds for which it calls in vain (60)",
        )

    def run(self, call: CommandCall) -> Result:
        from unisono.launch.agent import Agent, Refused
        from unisono.launch.local_host import cores
        from unisono.verbs.train.run import ENTRY

        args, settings = call.args, call.settings
        door, name, room = _door(args.door), args.name or socket.gethostname(), args.ranks or cores()
        if room < 1:
            raise UsageError(f"a host for {room} ranks", where="--ranks", fix="--ranks 1", code="C02")
        where = f"{door['address']}:{door['port']}"
        if settings.dry_run:
            return call.would(
                {"address": where, "room": room}, f"would join {where} with room for {room} ranks"
            )
        again = partial(_door, args.door) if args.door != "-" else lambda: door
        agent = Agent(
            again, name, room, ENTRY, args.patience, lambda text: settings.note(f"host {name}: {text}")
        )
        try:
            agent.run()
        except Refused as error:
            raise UsageError(f"{where}: {error}", where="unisono host", fix="the door of the run that goes on now",
                             code="L11") from error  # fmt: skip
        except ConnectionError as error:
            raise UsageError(str(error), where="unisono host", likely="the run is over, or cannot be reached from here",
                             code="L11") from error  # fmt: skip
        return {"address": where, "room": room, "name": name}


def _door(text: str) -> dict[str, Any]:
    """Where to join. Raises UsageError U-L11."""
    path = Path(text, "door.json") if Path(text).is_dir() else Path(text)
    try:
        address = json.loads(sys.stdin.readline() if text == "-" else read_text(path, TEXT))
        words = {key: str(address[key]) for key in ("address", "token", "certificate")}
        silent = float(address["silent"])
        if not 0.0 < silent < float("inf"):  # nor nan
            raise ValueError(f"silent {silent}")
        return {**words, "port": int(address["port"]), "silent": silent}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{text} does not say where to join a run", where="unisono host",
            likely="the run was not started with --hosts, or it is over" if text != "-" else str(error),
            fix="unisono host RUN, a run folder with a door.json", code="L11",
        ) from error  # fmt: skip
