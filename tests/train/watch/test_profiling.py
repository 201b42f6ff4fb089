"""Profiled steps: nothing is installed outside of them, and inside of them clocks, modules and bytes are right."""

import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.spec.sink import RunFacts

pytestmark = pytest.mark.timeout(120)


def hooks(run: Any) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks)
        for stage in run.local.stages.values()
        for m in stage.modules()
    )


def watched(ctx: Any, folder: str) -> dict[str, Any]:
    """Four steps of one rank, the third profiled: what is installed before each and at the end."""
    import torch

    from unisono.train.step.train_step import train_step
    from unisono_contrib.report.profile.digest import digest
    from unisono_contrib.report.profile.kineto import read, tree
    from unisono_contrib.train.sinks.profile import ProfileSink

    run, feed, val = started(ctx, recipe(Path(folder)), "dp=1")
    facts = RunFacts(Path(folder), 0, 1, "here", "gloo", {"dp": 0}, 0, 4, run.recorder, live=run)
    run.recorder.host_clock.reference = lambda: time.time_ns() + 3_000_000_000
    run.recorder.host_clock.ask()
    begun_ns, before, observer, seen = 0, hooks(run), ProfileSink(first=3, last=3).open(facts), []
    for step in range(4):
        seen.append(
            (
                hooks(run) - before, run.recorder.looks, run.recorder.calls.also is not None,
                torch.autograd._profiler_enabled(),
                any(t.name == "unisono line sampler" for t in threading.enumerate()),
            )
        )  # fmt: skip
        run.recorder.step, begun_ns = step + 1, time.time_ns() if step < 3 else begun_ns
        train_step(run, feed.fetch(step, run.leaves))
        observer.ended(step + 1, step == 3)
    observer.close()
    feed.close()
    val.close()
    profile = read(Path(folder, "profile", "rank0.json.gz"))
    sums = digest([profile])
    held = {kind: int(n) for kind, n in profile.facts["held"].items()}
    spans = [s for s in profile.spans if s.kind in ("forward", "backward")]
    ops = [n for n in tree(profile) if n.range.name in ("aten::addmm", "aten::embedding") and not n.backward]
    inside = [any(s.start_ns <= n.start_ns and n.stop_ns <= s.stop_ns for s in spans) for n in ops]
    return {
        "seen": seen, "after": hooks(run) - before, "held": held, "inside": inside,
        "parameters": sum({p.data_ptr(): p.numel() for slot in run.local.slots for p in [slot.master]}.values()),
        "ahead": (min(s.start_ns for s in spans) - begun_ns) * 1e-9,
        "modules": {m.name: [m.forward_s, m.backward_s, m.calls] for m in sums.modules},
        "memory": [sums.memory[0].total, dict(sums.memory[0].kinds)], "steps": [sums.first, sums.last],
        "alive": sum(a.nbytes for a in profile.allocations), "lines": len(sums.lines),
    }  # fmt: skip


def test_nothing_is_installed_outside_of_the_steps(world: World, tmp_path: Path) -> None:
    (said,) = world(watched, 1, folder=str(tmp_path), group=False)
    off = [False, False, False, False]
    assert [tuple(row[1:]) for row in said["seen"]] == [tuple(off), tuple(off), (True,) * 4, tuple(off)]
    assert [row[0] for row in said["seen"]][:2] == [0, 0] and said["seen"][2][0] > 20
    assert said["seen"][3][0] == said["after"] == 0

    # Torch's operators lie inside of our spans: both stand on one clock, which is that of all hosts.
    assert said["inside"] and all(said["inside"])
    assert 3.0 - 1e-3 <= said["ahead"] < 4.0
    # Each module of the model has its time, forward and backward, by its name in the whole model.
    modules = said["modules"]
    for name in ("stem.tok", "blocks.0.attn.qkv", "blocks.1.mlp.down", "blocks.1", "head.out"):
        assert modules[name][0] > 0 and modules[name][2] == 4, name
    assert all(modules[name][1] > 0 for name in ("blocks.0.attn.qkv", "blocks.1.mlp.down", "head.out"))
    # float64: weights once, AdamW's two moments beside a counter of each.
    assert said["held"]["params"] == 8 * said["parameters"]
    assert said["held"]["optim"] >= 16 * said["parameters"]
    assert said["memory"][0] == sum(said["memory"][1].values())
    assert said["memory"][1]["activations"] > 0 and said["lines"] > 0
    assert said["steps"] == [3, 3]


def oracle(ctx: Any, folder: str) -> dict[str, Any]:
    """A model of wide layers under our ranges, torch's Python tracer, and readings of the clock by tensor hooks."""
    import torch
    from torch import nn

    from unisono.observe.span import Recorder
    from unisono.train.watch.module_times import ModuleTimes
    from unisono_contrib.train.watch.profiling import Profiling

    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(384, 1536), nn.Linear(1536, 384)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(64, 384)
            self.blocks = nn.ModuleDict({str(i): Block() for i in range(3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks.values():
                x = block(x)
            return x

    model, recorder = Whole(), Recorder()
    empty = SimpleNamespace(_partial=(), _early=(), _late=())
    local = SimpleNamespace(
        stages={0: model}, slots=(), device=torch.device("cpu"), store=SimpleNamespace(holds=lambda x: False)
    )
    live = SimpleNamespace(
        local=local,
        gradients=empty,
        update=SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={})),
    )
    facts = RunFacts(Path(folder), 0, 1, "here", "gloo", {"dp": 0}, 0, 9, recorder, live=live)
    x = torch.randn(1024, 64)

    def step(number: int) -> None:
        recorder.step = number
        with recorder.span("forward"):
            loss = model(x).square().mean()
        with recorder.span("backward"):
            loss.backward()
        model.zero_grad()

    observer = Profiling(facts, 3, 6, stack=True)
    times = ModuleTimes({0: model}, recorder, torch.device("cpu"))
    looked = []
    for number in range(1, 7):
        if number >= 3:
            times._due = True
            times.begin()
        step(number)
        if times._look is not None:
            looked.append(times._end(times._look))
        observer.ended(number, False)
    return {"looked": looked}


def test_module_times_are_torchs_own(world: World, tmp_path: Path) -> None:
    """Forward beside what torch's Python tracer says of calls of modules; backward beside the moments at which gradients
    reach a module and leave it; within 5 %. Of four steps the one counts in which no other process came between."""
    from unisono_contrib.report.profile.digest import module_seconds
    from unisono_contrib.report.profile.kineto import MODULE, read, tree

    (said,) = world(oracle, 1, folder=str(tmp_path), group=False)
    profile = read(tmp_path / "profile" / "rank0.json.gz")
    nodes = tree(profile)
    theirs = sorted(
        (r for rows in profile.functions.values() for r in rows if r.name.startswith("nn.Module: ")),
        key=lambda r: r.start_ns,
    )
    off: defaultdict[str, list[float]] = defaultdict(list)
    for node in nodes:
        if node.range.name.startswith(MODULE) and "blocks" in node.module:
            around = [r for r in theirs if r.start_ns <= node.start_ns and node.stop_ns <= r.stop_ns]
            inner = min(around, key=lambda r: r.stop_ns - r.start_ns)
            length = inner.stop_ns - inner.start_ns
            off[f"{node.module} forward"].append(abs(node.stop_ns - node.start_ns - length) / length)
    assert len(off) == 9 and all(len(rows) == 4 for rows in off.values())

    backwards = sorted((s for s in profile.spans if s.kind == "backward"), key=lambda span: span.tags["step"])
    for span, looked in zip(backwards, said["looked"], strict=True):
        inside = [n for n in nodes if span.start_ns <= n.start_ns < span.stop_ns]
        ours = module_seconds(inside)
        for i in range(3):
            mine, hooked = (
                sum(pair[1] for name, pair in seconds.items() if name.startswith(f"blocks.{i}"))
                for seconds in (ours, looked)
            )
            off[f"blocks.{i} backward"].append(abs(mine - hooked) / hooked)
    assert {name: min(rows) for name, rows in off.items() if min(rows) > 0.05} == {}
