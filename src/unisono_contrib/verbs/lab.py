"""`unisono lab`: a command on several hosts that are none, over links as slow as one likes."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec import words
from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.settings import Settings
from unisono.verbs import CommandCall, Parser, Result, Verb

if TYPE_CHECKING:
    from unisono_contrib.lab.links import LabLink
    from unisono_contrib.lab.network import DeviceBytes
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
        parser.add_argument(
            "--ranks", type=int, metavar="N", help="in all, split between the hosts (one a host)"
        )
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
        from unisono_contrib.lab.play import commands

        args = call.args
        if not args.command:
            raise UsageError(
                "the lab has no command to run", where="unisono lab",
                fix="unisono lab --hosts 4 --rate 100mbit -- unisono train --demo", code="C04",
            )  # fmt: skip
        link, counts = LabLink(args.rate, args.delay), links.dealt(args.ranks or args.hosts, args.hosts)
        cores = len(os.sched_getaffinity(0))
        started = commands(args.command, counts, call.environ, args.starter, cores, args.each)
        if call.settings.dry_run:
            return _would(call, link, counts, started)
        require(link)
        return _played(call, link, counts, started)


def _read(reader: Callable[[str], float]) -> Callable[[str], float]:
    """A reader of a number with a unit whose mistakes argparse tells."""

    def read(text: str) -> float:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


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


# What is told at the end: bytes of each link, beside those that the run counted itself.


@dataclass(frozen=True, slots=True)
class Tally:
    """Where a run of `unisono train` will write what it counts, and what stood there before; nowhere for a command
    that is none."""

    folder: Path | None
    begun: float
    before: Mapping[Path, int]  # bytes of each file

    @classmethod
    def begin(cls, call: CommandCall) -> "Tally":
        folder = _folder_of(call)
        return cls(folder, time.time(), {file: file.stat().st_size for file in _files(folder)})

    def payload(self) -> int | None:
        """Bytes that the ranks sent in all steps since, as they count them; None where no run says so."""
        written = [file for file in _files(self.folder) if file.stat().st_mtime >= self.begun - 1]
        if not written:
            return None
        newest = max(written, key=lambda file: file.stat().st_mtime).parent  # of one run, a file a rank
        mine = [file for file in written if file.parent == newest]
        return sum(sum(_sent(file.read_bytes()[self.before.get(file, 0) :])) for file in mine)


def _files(folder: Path | None) -> list[Path]:
    return [] if folder is None else list(folder.rglob("events/rank*.jsonl"))


def _sent(text: bytes) -> Iterator[int]:
    """Bytes that one rank sent in each step."""
    for line in text.splitlines():
        with suppress(ValueError):
            step = json.loads(line)
            if isinstance(step, dict) and isinstance(step.get("bytes"), dict):
                yield sum(step["bytes"].values())


def _folder_of(call: CommandCall) -> Path | None:
    """The folder of the runs of the recipe that a command trains."""
    command = list(call.args.command)
    at = next((n for n, word in enumerate(command) if Path(word).name == "unisono"), None)
    if at is None or command[at + 1 : at + 2] != ["train"]:
        return None
    from unisono.verbs import VERBS
    from unisono.verbs._recipe import loaded
    from unisono.verbs.train import resumed

    with suppress(UnisonoError):  # the command itself will tell what is wrong
        train_call = VERBS.find("train")().read(command[at + 2 :], call.settings, call.environ)
        if train_call.args.resume is not None:
            return resumed(train_call.args.resume)[0]
        recipe = loaded(train_call, train_call.args.file, demo=train_call.args.demo).recipe
        return Path(recipe.out.dir, recipe.name)
    return None


def table(
    carried: "Sequence[DeviceBytes]", payload: int | None, link: "LabLink", seconds: float
) -> list[str]:
    """The closing lines of a lab."""
    from unisono_contrib.lab.links import host_name

    lines = [f"{'link':<8}{'sent':>12}{'received':>12}   of its rate"]
    for host, traffic in enumerate(carried):
        busiest = max(traffic.sent, traffic.received)
        share = words.percent(8 * busiest / link.rate / seconds) if link.rate else "-"
        lines.append(
            f"{host_name(host):<8}{words.nbytes(traffic.sent):>12}{words.nbytes(traffic.received):>12}   {share}"
        )
    total = sum(traffic.sent for traffic in carried)
    said = f"all     {words.nbytes(total):>12}   "
    if payload:
        said += f"payload {words.nbytes(payload)}, as the run counts it ({total / payload:.3f} bytes a byte)"
    else:
        said += "payload not counted: no run of unisono train"
    return [*lines, said]
