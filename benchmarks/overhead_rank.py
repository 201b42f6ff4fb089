"""Blocks of steps with something and without, as one rank plays them (`overhead.py` says what is switched on)."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unisono.config import Recipe, resolve

BESIDE = ("watchdog", "guard", "snapshots")
NEVER = 1 << 40
LASTING = ("unisono-watchdog", "unisono-hear", "unisono-drain")
QUIET = 0.05
"""Of all cores, what other programs may take during a pair of blocks that counts as undisturbed."""
MOST = 3
"""How many times as many pairs as are asked for are played, until enough were undisturbed."""


def prepare(argument: dict[str, Any]) -> Any:
    """In the helper: the data."""
    from unisono.train.data.load import load

    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """In each rank: pairs of blocks. Times are in seconds, one entry a pair."""
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, connect, feeds, place_of

    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0)
    connect(place, ctx.store)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    kind = {"checkpoint": Saved, "trackers": Tracked}.get(argument["what"], Watched)
    with ExitStack() as held:
        blocks = kind(ctx, argument, run, feed, resolved, held)
        blocks.warm()
        number = 0
        while number < MOST * argument["pairs"] and not blocks.enough():
            for with_ in (False, True) if number % 2 else (True, False):
                blocks.play(with_)
            blocks.after(number)
            number += 1
    own = sum(slot.master.numel() for slot in run.local.slots if slot.counted(run.mesh.at))
    return {"parameters": own / run.mesh.dp.size, **blocks.told()}


def busy_seconds() -> float:
    """Processor time that everything on this machine has taken, and what its host took from it."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def clocks() -> tuple[float, float]:
    """Processor time of this process, and of its main thread."""
    return time.process_time(), time.thread_time()


class Blocks:
    """Blocks of steps of one run with something and without, which subclasses say."""

    def __init__(
        self, ctx: Any, argument: dict[str, Any], run: Any, feed: Any, resolved: Any, held: ExitStack
    ) -> None:
        self.ctx, self.argument, self.run, self.feed, self.resolved = ctx, argument, run, feed, resolved
        self.held = held
        self.length: int = argument["length"]
        self.times: dict[str, list[float]] = {}
        self.own = 0.0

    def step(self, with_: bool) -> None:
        """One step, and what comes after it."""

    @contextmanager
    def around(self, with_: bool) -> Iterator[Callable[[], object]]:
        """What is on during a block; gives what is waited for before its end counts."""
        yield lambda: None

    def play(self, with_: bool) -> None:
        """One block, and put down what a step of it took."""
        with self.around(with_) as settle:
            # Also the word without which the supervisor would take a long block for a hang.
            self.ctx.channel.send("block", with_=with_)
            self.run.mesh.world.barrier()
            begun, cpu, busy, self.own = time.perf_counter(), clocks(), busy_seconds(), 0.0
            for _ in range(self.length):
                self.step(with_)
            settle()
            self.run.mesh.world.barrier()
            seconds, cpu = time.perf_counter() - begun, [now - then for now, then in zip(clocks(), cpu)]
            others = self.all(busy_seconds() - busy)[0] - sum(self.all(cpu[0]))
            found = {
                "": seconds / self.length,
                "cpu_": cpu[0] / self.length,
                "lasting_": (self.lasting() if with_ else 0.0) / seconds,
                "beside_": self.beside(*cpu) / self.length,
                "others_": max(0.0, others) / seconds / (os.cpu_count() or 1),
            }
            kind = "with" if with_ else "without"
            self.put(**{name + kind: share for name, share in found.items()})
            self.ctx.channel.send("block", with_=None)

    def lasting(self) -> float:
        """Processor time in a block of threads that work by the clock, however long steps take."""
        return 0.0

    def beside(self, all_: float, main_: float) -> float:
        """Processor time in a block of what comes with steps and is no part of them. all_, main_: that of this process,
        and of its main thread."""
        return self.own + all_ - main_

    @contextmanager
    def called(self) -> Iterator[None]:
        """What is called in here, by any thread, is no part of a step."""
        begun = time.thread_time()
        yield
        self.own += time.thread_time() - begun

    def all(self, number: float) -> list[float]:
        """What each rank says."""
        import torch

        return self.run.mesh.world.all_gather(torch.tensor([number], dtype=torch.float64)).flatten().tolist()

    def enough(self) -> bool:
        """Whether as many pairs as were asked for were undisturbed; the same on all ranks."""
        pairs = zip(self.times.get("others_without", ()), self.times.get("others_with", ()), strict=True)
        quiet = sum(max(pair) < QUIET for pair in pairs)
        return self.all(quiet)[0] >= self.argument["pairs"]

    def put(self, **times: float) -> None:
        for name, seconds in times.items():
            self.times.setdefault(name, []).append(seconds)

    def warm(self) -> None:
        """Buffers are made, files are found; nothing of it counts."""
        self.play(False)
        self.play(True)
        self.times.clear()

    def after(self, number: int) -> None:
        """What is timed after the pair of that number, outside of blocks."""

    def told(self) -> dict[str, Any]:
        return {"times": self.times, "length": self.length}


class Watched(Blocks):
    """With guard, watchdog and snapshots, or the one that was asked for."""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        from unisono.train.build.build import place_of
        from unisono.train.recovery.snapshot_buffer import SnapshotBuffer
        from unisono.train.recovery.snapshots import Snapshots, among
        from unisono.train.state.cadence import Clock
        from unisono_contrib.train.watch.guard import install

        ctx, run, what = self.ctx, self.run, self.argument["what"]
        self.parts = BESIDE if what == "all" else (what,)
        self.clock = Clock()
        self.plain = self.guard = run.player
        if "guard" in self.parts:
            install(run, NEVER, feed=self.feed)
            self.guard, run.player = run.player, self.plain
        every = self.argument["every"] if "snapshots" in self.parts else 0
        buffer = SnapshotBuffer(ctx.shelf)
        put = buffer.put

        def timed(*terms: Any) -> None:
            with self.called():
                put(*terms)

        buffer.put = timed
        self.snapshots = Snapshots(
            run, self.resolved.plan, place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0), buffer, every,
            among(ctx.store, ctx.rank, ctx.world), lambda text: ctx.channel.send("note", text=text),
        )  # fmt: skip
        # `launch.rank.main` gives each rank its watchdog before this; here it is the blocks' affair.
        self.side = ctx.appear.__self__
        self.side.watchdog.close()
        self.stall = 0.0

    def warm(self) -> None:
        with self.around(True):
            for _ in range(6):  # by then it is known how often there are snapshots
                self.step(True)
        super().warm()
        if "guard" in self.parts:
            self._checked(True)  # it finds out whether gradients are the same each time
        self.snapshots.take_stall()

    def step(self, with_: bool) -> None:
        from unisono.train.step.train_step import train_step

        run, begun = self.run, time.perf_counter()
        leaves = self.feed.fetch(run.step, run.leaves)
        if with_ and "watchdog" in self.parts:
            train_step(run, leaves, self.ctx.channel.stop_requested)
            with self.called():
                self.clock.stepped(time.perf_counter() - begun)
                self.ctx.channel.send("step", step=run.step)
        else:
            train_step(run, leaves)
        if with_:
            with self.called():
                self.snapshots.stepped(time.perf_counter() - begun, {})
        run.recorder.lap()

    @contextmanager
    def around(self, with_: bool) -> Iterator[Callable[[], object]]:
        self.snapshots.settle()
        every = self.snapshots.every or 1
        self.length = -(-self.argument["length"] // every) * every  # each snapshot with the steps it is for
        with ExitStack() as held:
            if with_:
                self.run.player = self.guard
                held.callback(setattr, self.run, "player", self.plain)
                if "watchdog" in self.parts:
                    held.enter_context(self._watched())
            yield self.snapshots.settle
        self.stall += self.snapshots.take_stall().get("snapshot_stall", 0.0)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The threads beside the main one that a run under `unisono train` has."""
        from unisono.train.recovery.drain import Drain, DrainParts

        ctx, side = self.ctx, self.side
        side._watch(side.channel.meeting.place, ctx.store)
        ctx.appear(Path(self.argument["folder"]) / "alive")
        grace, store = self.resolved.recipe.launch.grace, ctx.store.clone()
        parts = DrainParts(self.run, self.clock, ctx.channel, store, ctx.world, grace, Path, lambda: False)
        with Drain(parts):
            yield
        side.watchdog.close()

    def lasting(self) -> float:
        threads = [thread for thread in threading.enumerate() if thread.name in LASTING]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(one.ident or 0)) for one in threads)

    def beside(self, all_: float, main_: float) -> float:
        return self.own  # others of this process's threads do more for a step, or less, each time

    def after(self, number: int) -> None:
        """A step with a check and one without, in either order: so checks by this rank and by its neighbour, which
        follow the step's number, come in turn."""
        if "guard" in self.parts:
            took = {check: self._checked(check) for check in ((False, True) if number % 2 else (True, False))}
            seconds, cpu = (with_ - without for with_, without in zip(took[True], took[False]))
            self.put(check=seconds, cpu_check=cpu)

    def _checked(self, check: bool) -> tuple[float, float]:
        """Seconds of such a step, and its processor time."""
        self.guard.every = 1 if check else NEVER
        self.run.player = self.guard
        self.run.mesh.world.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        self.step(False)
        self.run.mesh.world.barrier()
        self.guard.every, self.run.player = NEVER, self.plain
        return time.perf_counter() - begun, time.process_time() - cpu

    def told(self) -> dict[str, Any]:
        every = self.snapshots.every
        taken = self.length // every * self.argument["pairs"] if every else 0
        return super().told() | {"snapshots": every, "stall_s": self.stall / max(1, taken)}


class Saved(Blocks):
    """With an asynchronous checkpoint at its beginning."""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        from unisono.train.state.checkpoint import Saver
        from unisono.train.state.saving import Saving
        from unisono_contrib.train.state.checkpoint.mirror import Mirroring, place_at

        ctx, run, folder = self.ctx, self.run, Path(self.argument["folder"])
        mirror = None
        if self.argument["mirror"] and ctx.rank == 0:
            mirror = Mirroring(place_at(str(folder / "mirror"), folder / "run"), keep=2)
        saver = Saver(folder / "run", ctx.rank, ctx.world, token=ctx.run_token, keep=2)
        self.notes: list[str] = []
        self.saving = Saving(saver, run.mesh.world, run.local.device, self.notes.append, mirror)
        self.held.callback(self.saving.close)
        self.due = False

    def step(self, with_: bool) -> None:
        from unisono.train.state.run_state import kept_of, pieces_of
        from unisono.train.step.train_step import train_step

        begun = time.perf_counter()
        if self.due:
            self.due = False
            with self.called():
                self.saving.settle()
                pieces = [*pieces_of(self.run), *kept_of(self.run)]
                self.saving.save(self.run.step, pieces, {"step": self.run.step}, blocking=False, last=False)
            self.put(call=time.perf_counter() - begun)
        train_step(self.run, self.feed.fetch(self.run.step, self.run.leaves))
        self.saving.poll()
        self.run.recorder.lap()
        self.put(**{"lap_with" if with_ else "lap_without": time.perf_counter() - begun})

    @contextmanager
    def around(self, with_: bool) -> Iterator[Callable[[], object]]:
        self.due = with_
        yield self.saving.settle if with_ else lambda: None

    def told(self) -> dict[str, Any]:
        return super().told() | {"notes": self.notes}


class Tracked(Blocks):
    """With trackers beside the metrics that each run writes. Their followers are stopped in blocks without."""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        from unisono.spec.sink import SINKS, RunFacts
        from unisono.train.watch.journal import Journal

        ctx, run, recipe = self.ctx, self.run, self.resolved.recipe
        self.journals: dict[bool, Journal] = {}
        self.followers: list[Any] = []
        for with_ in (False, True) if ctx.rank == 0 else ():
            folder = Path(self.argument["folder"]) / "tracked" / ("with" if with_ else "without")
            folder.mkdir(parents=True)
            facts = RunFacts(folder, ctx.rank, ctx.world, "here", "gloo", run.mesh.at, 0, recipe.train.steps,
                             run.recorder)  # fmt: skip
            sinks = [SINKS.read(name) for name in ("metrics", *(self.argument["track"] if with_ else ()))]
            observers = [sink.open(facts) for sink in sinks]
            self.journals[with_] = Journal(observers, run.replica.global_batch)
            self.held.callback(self.journals[with_].close)
            self.followers += [one._follower.process.pid for one in observers if hasattr(one, "_follower")]

    def step(self, with_: bool) -> None:
        from unisono.train.step.train_step import train_step

        begun = time.perf_counter()
        report = train_step(self.run, self.feed.fetch(self.run.step, self.run.leaves))
        lap = self.run.recorder.lap()
        if self.journals:
            with self.called():
                self.journals[with_].add(report, lap, time.perf_counter() - begun)

    @contextmanager
    def around(self, with_: bool) -> Iterator[Callable[[], object]]:
        for follower in self.followers:
            os.killpg(follower, signal.SIGCONT if with_ else signal.SIGSTOP)
        try:
            yield lambda: None
        finally:
            for follower in self.followers:
                os.killpg(follower, signal.SIGCONT)

    def beside(self, all_: float, main_: float) -> float:
        return self.own
