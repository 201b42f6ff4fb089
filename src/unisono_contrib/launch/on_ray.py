"""Ranks as actors of Ray: `python -m unisono_contrib.launch.on_ray --ranks 4 -- unisono train FILE --resume auto`. No
torch.

A placement group holds what all ranks need, so that they start together or not at all. Each actor starts one rank as a
process where Ray has put it. Where a host or a worker is lost, or the ranks have saved, all are placed again, up to
`--restarts` times: the run itself goes on from its newest checkpoint. What Ray restores by itself is not used.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unisono.spec.errors import UnisonoError
from unisono_contrib.launch.node import code_of, environment
from unisono_contrib.launch.ray_cluster import connected, library

_LOOK = 0.1  # seconds between two looks at actors
_SAVED = 75
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where Ray has put an actor. port: free there a moment ago."""

    host: str
    address: str
    port: int
    gpus: tuple[str, ...]


@dataclass
class RankActor:
    """One rank, inside a worker of Ray. Its two methods `run` and `stop` are called at the same time."""

    stopped: list[int] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None

    def seat(self) -> Seat:
        ray = library()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Seat(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port, gpus)

    def run(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> int:
        """Start the rank and wait for it; its exit code."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], env={**os.environ, **variables}, cwd=folder
        )
        for number in self.stopped:
            self.process.send_signal(number)
        try:
            return self.process.wait()
        finally:
            self.process.kill()

    def stop(self, number: int) -> None:
        """Send the rank a signal, now or once it is there."""
        self.stopped.append(number)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def places(seats: Sequence[Seat]) -> list[tuple[int, dict[str, str]]]:
    """(number of the actor, variables of its rank) by rank: ranks of a host follow each other, and each sees the GPUs
    of all ranks of its host, among which it takes its own."""
    hosts = list(dict.fromkeys(seat.host for seat in seats))
    order = sorted(range(len(seats)), key=lambda actor: hosts.index(seats[actor].host))
    first, seated = seats[order[0]], list[tuple[int, dict[str, str]]]()
    for rank, actor in enumerate(order):
        here = [other for other in order if seats[other].host == seats[actor].host]
        gpus = [gpu for other in here for gpu in seats[other].gpus]
        variables = environment(rank, len(seats), here.index(actor), len(here), first.address, first.port)
        seated.append((actor, {**variables, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}))
    return seated


@dataclass
class RayRanks:
    """All ranks of a run on a cluster. resources, variables: of each, beside its place. signals: those that
    came."""

    ray: Any
    count: int
    resources: Mapping[str, float]
    patience: float
    variables: Mapping[str, str] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)

    def play(self, command: Sequence[str], restarts: int) -> int:
        """Run until the ranks are done, or have saved since somebody asked them to; the exit code."""
        for start in range(restarts + 1):
            codes, lost = self.start(command)
            code = code_of(codes)
            again = lost or code == _SAVED or any(number < 0 or number > 128 for number in codes)
            if (code == 0 and not lost) or self.signals or not again:
                return code or (_SAVED if lost else 0)
            why = "saved" if code == _SAVED else "ranks or hosts were lost"
            print(f"note  start {start + 1} of {restarts + 1} has ended: {why}", file=sys.stderr, flush=True)
        return code or 1

    def start(self, command: Sequence[str]) -> tuple[list[int], bool]:
        """(exit codes in the order of the ends, whether an actor was lost) of one start of all ranks."""
        util = self.ray.util
        group = util.placement_group([dict(self.resources)] * self.count, strategy="PACK")
        try:
            if not self._placed(group):
                return [_SAVED], False
            kind = self.ray.remote(max_concurrency=2, max_restarts=0, **_options(self.resources))(RankActor)
            at = util.scheduling_strategies.PlacementGroupSchedulingStrategy
            actors = [
                kind.options(scheduling_strategy=at(group, placement_group_bundle_index=bundle)).remote()
                for bundle in range(self.count)
            ]
            try:
                seats = self.ray.get([actor.seat.remote() for actor in actors])
            except self.ray.exceptions.RayError:
                return [], True
            folder = os.getcwd()
            tasks = [
                actors[actor].run.remote(command, {**self.variables, **known}, folder)
                for actor, known in places(seats)
            ]
            return self._ended(actors, tasks)
        finally:
            util.remove_placement_group(group)  # which ends what still is in it

    def _placed(self, group: Any) -> bool:
        """Wait until all ranks have their place; False once somebody asked to stop."""
        ready, note_at = group.ready(), time.monotonic() + 30.0
        while not self._wait([ready])[0]:
            if self.signals:
                return False
            if time.monotonic() > note_at:
                print(f"note  waiting for {self.count} x {dict(self.resources)}", file=sys.stderr, flush=True)
                note_at = float("inf")
        return True

    def _ended(self, actors: Iterable[Any], tasks: Sequence[Any]) -> tuple[list[int], bool]:
        left, codes, lost = [*tasks], list[int](), False
        until, sent = float("inf"), 0
        while left and time.monotonic() < until:
            for number in self.signals[sent:]:
                for actor in actors:
                    actor.stop.remote(number)
            sent = len(self.signals)
            ready, left = self._wait(left)
            for task in ready:
                try:
                    codes.append(self.ray.get(task))
                except self.ray.exceptions.RayError:
                    lost = True
                if lost or codes[-1]:
                    until = min(until, time.monotonic() + self.patience)
        return codes, lost

    def _wait(self, tasks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(tasks that have ended, the others) after a moment; a signal that came meanwhile is in `signals`."""
        return self.ray.wait([*tasks], num_returns=1, timeout=_LOOK)


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """What an actor takes of its bundle, which is all of it."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    return {names[name]: count for name, count in resources.items()}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m unisono_contrib.launch.on_ray", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="how many actors")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of each")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each")
    parser.add_argument("--mib", type=int, default=0, help="MiB of memory of each")
    parser.add_argument("--restarts", type=int, default=6, help="how often all are placed again")
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds that ranks have to end after a failure"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of all ranks"
    )
    parser.add_argument("command", nargs="+", help="what each rank runs, behind --: unisono train FILE")
    args = parser.parse_args(words)
    needs = {"CPU": args.cpus, "GPU": args.gpus, "memory": args.mib << 20}
    resources = {name: count for name, count in needs.items() if count}
    try:
        with connected("unisono launch ray", "unisono launch ssh") as ray:
            import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports]

            variables = dict(variable.split("=", 1) for variable in args.env)
            ranks = RayRanks(ray, args.ranks, resources, args.patience, variables)
            for number in _HEARD:
                signal.signal(number, lambda number, frame: ranks.signals.append(number))
            return ranks.play(args.command, args.restarts)
    except UnisonoError as error:
        with suppress(OSError):
            print(error.render(), file=sys.stderr)
        return error.exit


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
