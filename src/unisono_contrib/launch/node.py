"""The ranks of one node, where a scheduler starts one process a node: `python -m unisono_contrib.launch.node -- unisono
train FILE` starts `python -m unisono train FILE` as each of them. No torch.

It passes signals on, and leaves with what the ranks left with: 75 if they have saved. (torchrun leaves with 1 then, and
no scheduler can tell a saved run from a broken one.)
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from unisono.spec.errors import UsageError
from unisono_contrib.launch.nodes import NodePlace, node_in

_LOOK = 0.05  # seconds between two looks at the ranks
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SAVED = 75


def environments(place: NodePlace, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank of this node: plain variables, without those of schedulers that mean the node."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    first, world = place.node * place.ranks, place.nodes * place.ranks
    return [
        {**kept, **environment(first + local, world, local, place.ranks, place.master, place.port)}
        for local in range(place.ranks)
    ]


def environment(rank: int, world: int, local: int, here: int, master: str, port: int) -> dict[str, str]:
    """The plain variables of a rank, which is number `local` of `here` on its host."""
    known = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here,
             "MASTER_ADDR": master, "MASTER_PORT": port}  # fmt: skip
    return {name: str(value) for name, value in known.items()}


def code_of(codes: Iterable[int]) -> int:
    """What the node leaves with, from what its ranks left with, in the order of their ends: 0 if all did, 75 if those
    that did not have saved; else 2 for a mistake that stays one, or what the first of them left with."""
    failed = [128 - code if code < 0 else code for code in codes if code]
    if not failed or set(failed) == {_SAVED}:
        return failed[0] if failed else 0
    return 2 if 2 in failed else next(code for code in failed if code != _SAVED)


def play(command: Sequence[str], environs: Sequence[Mapping[str, str]], patience: float) -> int:
    """Start a process for each environment and wait for all; the exit code of the node. patience: seconds that the
    others have to end by themselves once one has failed, and after they were asked to."""
    ranks: list[subprocess.Popen[bytes]] = []
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        _send(ranks, number)

    for number in _HEARD:
        signal.signal(number, hear)
    for environ in environs:
        ranks.append(subprocess.Popen(command, env=dict(environ)))
        _send(ranks[-1:], *heard)  # what came before this rank was there
    codes: list[int] = []
    left, until, stopping = [*ranks], float("inf"), False
    while left:
        for rank in [rank for rank in left if rank.poll() is not None]:
            left.remove(rank)
            codes.append(rank.returncode)
            if rank.returncode:
                until = min(until, time.monotonic() + patience)
        if time.monotonic() > until:
            _send(left, signal.SIGKILL if stopping else signal.SIGTERM)
            until, stopping = time.monotonic() + patience, True
        time.sleep(_LOOK)
    return code_of(codes)


def _send(ranks: Iterable["subprocess.Popen[bytes]"], *numbers: int) -> None:
    for rank in ranks:
        for number in numbers:
            if rank.poll() is None:
                rank.send_signal(number)


def place_of(args: argparse.Namespace, environ: Mapping[str, str]) -> NodePlace:
    """The node as flags and the scheduler say. Raises UsageError L02 where something is missing."""
    place = node_in(environ) or NodePlace("flags", 0, 0)
    master, _, port = (args.master or "").rpartition(":")
    place = replace(
        place,
        node=place.node if args.node is None else args.node,
        nodes=args.nodes or place.nodes,
        ranks=args.ranks or place.ranks or 1,
        master=master or place.master,
        port=int(port) if port else place.port,
    )
    if place.nodes < 1 or not place.master or not 0 <= place.node < place.nodes:
        raise UsageError(
            f"{place.source} says node {place.node} of {place.nodes}, which meet at {place.master or 'no known host'}",
            where="python -m unisono_contrib.launch.node", code="L02",
            fix="--nodes N --node I --master HOST:PORT, or a scheduler that says it",
        )  # fmt: skip
    return place


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m unisono_contrib.launch.node", description=__doc__)
    parser.add_argument(
        "--ranks", type=int, help="ranks of each node; as many as it has GPUs, if the scheduler says"
    )
    parser.add_argument("--nodes", type=int, help="nodes, if the scheduler does not say")
    parser.add_argument("--node", type=int, help="number of this node, if the scheduler does not say")
    parser.add_argument(
        "--master", metavar="HOST:PORT", help="where ranks meet, if the scheduler does not say"
    )
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds that ranks have to end after a failure"
    )
    parser.add_argument("command", nargs="+", help="what each rank runs, behind --: unisono train FILE")
    args = parser.parse_args(words)
    try:
        place = place_of(args, environ)
    except UsageError as error:
        print(error.render(), file=sys.stderr)
        return error.exit
    return play([sys.executable, "-m", *args.command], environments(place, environ), args.patience)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
