"""`unisono lab`: a command on several hosts that are none, over links as slow as one likes."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UsageError
from unisono.spec.settings import Settings
from unisono.verbs import CommandCall, Parser, Result, Verb

if TYPE_CHECKING:
    from unisono_contrib.lab.links import LabLink
    from unisono_contrib.lab.play import LabCommand


class LabVerb(Verb):
    """Run a command on several hosts of a made-up network, over slow links.

    Each host has a network, a name and process numbers of its own; cables of --rate join two of them, or more with a
    switch between. The command is started once for each rank, under the variables of a starter, so that its ranks meet
    over the links. Afterwards nothing is left, also after Ctrl-C or kill -9. Needs root, ip and tc; leaves with 77
    where they are missing.
    """

    name = "lab"
    epilog = (
        "unisono lab --hosts 4 --rate 100mbit -- unisono train --demo\n"
        "unisono lab --hosts 2 --rate 1gbit --delay 20ms --ranks 4 -- unisono bench net\n"
        "unisono lab --hosts 2 --each host -- torchrun --nnodes {hosts} --node-rank {host}\n"
        "    --nproc-per-node {local_ranks} --master-addr {master} --master-port {port} train.py\n"
        "unisono lab --hosts 4 --each first -- unisono train --demo --hosts {names} --plan dp=4"
    )

    def flags(self, parser: Parser) -> None:
        from unisono_contrib.lab.links import delay_of, rate_of

        parser.usage = "unisono lab [--hosts N] [--rate R] [--delay D] [--ranks N] -- COMMAND ..."
        parser.add_argument("--hosts", type=int, default=4, metavar="N", help="how many (4)")
        parser.add_argument(
            "--rate", type=_read(rate_of), default=100e6, metavar="R",
            help="of each link, each way: 100mbit (the default), 1gbit; 0: no limit",
        )  # fmt: skip
        parser.add_argument(
            "--delay", type=_read(delay_of), default=0.0, metavar="D",
            help="from one host to another, one way: 20ms, 500us (none)",
        )  # fmt: skip
        parser.add_argument("--ranks", type=int, metavar="N", help="in all, dealt to the hosts (one a host)")
        parser.add_argument(
            "--each", choices=("rank", "host", "first"), default="rank",
            help="what the command is started for: each rank; each host, whose launcher it is then; or the first host"
            " alone, for unisono train --hosts {names}",
        )  # fmt: skip
        parser.add_argument(
            "--starter", default="environment", metavar="NAME",
            help="whose variables ranks find: environment, torchrun, slurm, mpi",
        )  # fmt: skip

    def read(self, words: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> CommandCall:
        at = list(words).index("--") if "--" in words else len(words)
        args = self.parser().read(words[:at])
        args.command = list(words[at + 1 :])
        return CommandCall(settings, args, environ)

    def code(self, result: Result) -> int:
        """The command's own."""
        return result["exit"] if result is not None and "exit" in result else 0

    def run(self, call: CommandCall) -> Result:
        from unisono_contrib.lab import links
        from unisono_contrib.lab.links import LabLink
        from unisono_contrib.lab.network import require

        args = call.args
        if not args.command:
            raise UsageError(
                "the lab has no command to run", where="unisono lab",
                fix="unisono lab --hosts 4 --rate 100mbit -- unisono train --demo", code="C04",
            )  # fmt: skip
        link, counts = LabLink(args.rate, args.delay), links.dealt(args.ranks or args.hosts, args.hosts)
        commands = _commands(call, counts)
        if call.settings.dry_run:
            return _would(call, link, counts, commands)
        require(link)
        return _played(call, link, counts, commands)


def _read(reader: Callable[[str], float]) -> Callable[[str], float]:
    """A reader of a number with a unit whose mistakes argparse tells."""

    def read(text: str) -> float:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _commands(call: CommandCall, counts: Sequence[int]) -> "list[LabCommand]":
    from unisono_contrib.lab.play import command_of_first, commands, commands_by_host

    args, cores = call.args, len(os.sched_getaffinity(0))
    if args.each == "first":
        return command_of_first(args.command, counts, call.environ, cores)
    if args.each == "host":
        return commands_by_host(args.command, counts, call.environ, cores)
    return commands(args.command, counts, call.environ, args.starter, cores)


def _facts(link: "LabLink", counts: Sequence[int]) -> dict[str, Any]:
    return {"hosts": len(counts), "ranks": sum(counts), "rate_bit_s": link.rate, "delay_s": link.delay}


def _would(
    call: CommandCall, link: "LabLink", counts: Sequence[int], started: "Sequence[LabCommand]"
) -> Result:
    import shlex

    from unisono_contrib.lab import links

    lines = [f"{len(counts)} hosts, {link.says()}"]
    for command in started:
        ours = {key: text for key, text in command.environ.items() if call.environ.get(key) != text}
        said = shlex.join([*(f"{key}={text}" for key, text in sorted(ours.items())), *command.argv])
        lines.append(f"{links.host_name(command.host)}  {said}")
    commands = [{"host": command.host, "argv": list(command.argv)} for command in started]
    return call.would({**_facts(link, counts), "commands": commands}, *lines)


def _played(
    call: CommandCall, link: "LabLink", counts: Sequence[int], commands: "Sequence[LabCommand]"
) -> Result:
    from unisono_contrib.lab.network import LabNetwork
    from unisono_contrib.lab.play import Play
    from unisono_contrib.verbs._lab import Tally, table

    tally = Tally.begin(call)
    each = {"rank": "one a rank", "host": "one a host", "first": "on the first"}[call.args.each]
    started = f"{len(commands)} process{'es' * (len(commands) > 1)}, {each}"
    call.settings.note(f"lab     {len(counts)} hosts, {link.says()}; {started}")
    # With --json, what the command prints goes to stderr: stdout is the lab's own object.
    stdout = sys.stderr.fileno() if call.settings.json else None
    with LabNetwork(len(counts), link) as network, Play(network, call.settings.note, stdout) as play:
        before, begun = network.traffic(), time.perf_counter()
        code = play.run(commands, os.getcwd())
        seconds = time.perf_counter() - begun
        carried = [after.since(old) for after, old in zip(network.traffic(), before, strict=True)]
    payload = tally.payload()
    for line in table(carried, payload, link, seconds):
        call.settings.note(line)
    rows = [
        {"host": host, "sent": traffic.sent, "received": traffic.received}
        for host, traffic in enumerate(carried)
    ]
    return {**_facts(link, counts), "seconds": seconds, "links": rows, "payload_bytes": payload, "exit": code}
