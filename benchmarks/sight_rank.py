"""Blocks of steps with a part of what sees a run and without it, as one rank plays them; `sight_blocks.py` has them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from overhead_rank import Blocks
from overhead_rank import prepare as prepare

_NEVER = 1 << 40


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """In each rank: pairs of blocks. Times are in seconds, one entry a pair."""
    from unisono.config import Recipe, resolve
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, connect, feeds, place_of

    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0)
    connect(place, ctx.store)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    with ExitStack() as held:
        blocks = PARTS[argument["what"]](ctx, argument, run, feed, resolved, held)
        if blocks.absent:
            return {"absent": blocks.absent}
        blocks.warm()
        number = 0
        while number < 2 * argument["pairs"] and not blocks.enough():
            for with_ in (False, True) if number % 2 else (True, False):
                blocks.play(with_)
            number += 1
    return blocks.told()


class Nothing(Blocks):
    """Off in both kinds of blocks: how far two of them are apart by chance."""

    absent = ""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        self.folder = Path(self.argument["folder"])
        self.facts = self._facts()

    def _facts(self) -> Any:
        from unisono.spec.sink import RunFacts

        ctx, run = self.ctx, self.run
        return RunFacts(
            self.folder, ctx.rank, ctx.world, "bench", "gloo", run.mesh.at, 0, _NEVER, run.recorder
        )

    def step(self, with_: bool) -> None:
        from unisono.train.step.train_step import train_step

        begun = time.perf_counter()
        train_step(self.run, self.feed.fetch(self.run.step, self.run.leaves))
        self.seen(with_, self.run.recorder.lap(), time.perf_counter() - begun)

    def seen(self, with_: bool, lap: Any, seconds: float) -> None:
        """What is done after a step."""


class Resources(Nothing):
    """A sample of the rank and the host each second, by a thread."""

    @contextmanager
    def around(self, with_: bool) -> Iterator[Callable[[], object]]:
        from unisono_contrib.train.sinks._resources import ResourceSampler

        sampler = ResourceSampler(self.facts, 1.0) if with_ else None
        yield lambda: None
        if sampler is not None:
            sampler.close()


class Calls(Nothing):
    """Each collective in the log, and its row in the line of the step."""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        self.log = _part("unisono.observe.calls")
        self.absent = "" if self.log else "calls are not logged in this version"
        if self.log:
            self.real, self.quiet = self.run.recorder.call, self.log.CallLog().begin("", "", 0, "")

    @contextmanager
    def around(self, with_: bool) -> Iterator[Callable[[], object]]:
        self.run.recorder.call = self.real if with_ else lambda *words: self.quiet
        yield lambda: None

    def seen(self, with_: bool, lap: Any, seconds: float) -> None:
        if with_:
            json.dumps({"calls": self.log.rows(lap.calls, lap.start_ns, self.log.MOST // 4)[0]})


class Modules(Nothing):
    """Times of modules, in as many steps as a run looks at."""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        part = _part("unisono.train.watch.module_times")
        self.absent = "" if part else "modules are not timed in this version"
        self.times = {}
        self.looks = part and part.ModuleTimes(
            self.run.local.stages, self.run.recorder, self.run.local.device
        )

    def seen(self, with_: bool, lap: Any, seconds: float) -> None:
        if with_:
            self.looks.stepped(self.run.step, seconds)


class Profile(Nothing):
    """A profile of steps that are far away."""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        part = _part("unisono_contrib.train.watch.profiling")
        self.absent = "" if part else "there is no profiler in this version"
        self.observer = part and part.Profiling(self.facts, _NEVER, _NEVER, False)

    def seen(self, with_: bool, lap: Any, seconds: float) -> None:
        if with_:
            self.observer.ended(self.run.step, False)


class Dash(Nothing):
    """`unisono dash` with somebody who looks on; between its blocks it is stopped. The run writes its lines in all."""

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        from unisono.spec.sink import SINKS

        self.absent = "" if _part("unisono_contrib.verbs.dash") else "there is no dash in this version"
        self.sinks = [SINKS.read(name).open(self.facts) for name in ("metrics", "events")]
        self.server: subprocess.Popen[str] | None = None
        if not self.absent and self.ctx.rank == 0:
            (self.folder / "config.resolved.toml").write_text('name = "bench"\n')
            words = [sys.executable, "-m", "unisono", "dash", str(self.folder), "--port", "0", "--no-token"]
            self.server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.held.callback(self.server.kill)
            assert self.server.stdout
            line = next(line for line in self.server.stdout if "http://" in line)
            self.address = "http://" + line.partition("http://")[2].split()[0].rstrip("/")
            threading.Thread(target=self._look_on, daemon=True).start()

    def _look_on(self) -> None:
        with suppress(OSError), urllib.request.urlopen(f"{self.address}/events") as stream:
            while stream.read1(1 << 16):
                pass

    @contextmanager
    def around(self, with_: bool) -> Iterator[Callable[[], object]]:
        if self.server is not None:
            os.kill(self.server.pid, signal.SIGCONT if with_ else signal.SIGSTOP)
        yield lambda: None

    def seen(self, with_: bool, lap: Any, seconds: float) -> None:
        from unisono.spec.sink import StepRecord

        sent = {".".join(key): n for key, n in lap.nbytes.items()}
        record = StepRecord(self.run.step, 1.0, 1e-3, 1.0, 1000, seconds, lap.seconds, sent, 100.0)
        for sink in self.sinks:
            sink.observe([record])


PARTS: dict[str, type[Nothing]] = {
    "off": Nothing, "calls": Calls, "modules": Modules, "resources": Resources, "profile": Profile, "dash": Dash,
}  # fmt: skip


def _part(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None
