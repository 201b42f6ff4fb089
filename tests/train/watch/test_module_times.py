"""Times of modules: what takes long is named, waits are none, and no bit changes."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.observe.span import Recorder
from unisono.train.watch.module_times import ModuleTimes
from unisono_contrib.train.recovery.lagging import _Late


class Parts(nn.Module):
    """Two branches, one after the other, around which x passes."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.act(self.attn(x))
        return x + self.mlp(x)


class Small(nn.Module):
    """A stage: its stem looks rows up, so that no gradient leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(8, 4)
        self.blocks = nn.ModuleDict({"0": Parts(), "1": Parts()})
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x).square().sum()


NAMES = ["stem", *(f"blocks.{i}{part}" for i in range(2) for part in ("", ".attn", ".mlp")), "head"]
LONG = 0.03


class Slow:
    """The steps of a recorder; `sleep` is long and is none of the rank's time where it is a wait."""

    def __init__(self, recorder: Recorder, waits: bool) -> None:
        self.step, self._recorder, self._waits = None, recorder, waits

    def sleep(self) -> None:
        if self._waits:
            with self._recorder.span("wait"):
                time.sleep(LONG)
        else:
            time.sleep(LONG)


def slowed(module: nn.Module, slow: Slow, backward: bool) -> None:
    inner = module.forward

    def forward(*args: Any) -> Any:
        if backward:
            return _Late.apply(inner(*args), slow)
        slow.sleep()
        return inner(*args)

    module.forward = forward


def looked_at(model: nn.Module, recorder: Recorder, micros: int = 1) -> dict[str, tuple[float, float]]:
    """The times of one step."""
    times = ModuleTimes({0: model}, recorder, torch.device("cpu"))
    times.stepped(1, 10.0)
    model(torch.arange(6)).backward()  # a validation between steps is none of them
    times.begin()
    for _ in range(micros):
        model(torch.arange(6)).backward()
    times.stepped(2, 10.0)
    model(torch.arange(6)).backward()
    recorder_modules = dict(recorder.lap().modules)
    assert recorder.lap().modules == {}
    return recorder_modules


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backward", [False, True])
def test_what_takes_long_is_named(name: str, backward: bool) -> None:
    torch.manual_seed(0)
    model, recorder = Small(), Recorder()
    slowed(model.get_submodule(name), Slow(recorder, waits=False), backward)
    modules = looked_at(model, recorder, micros=2)
    assert list(modules) == NAMES
    for other, pair in modules.items():
        for part, seconds in enumerate(pair):
            if other == name and part == backward:
                assert seconds >= 2 * LONG
            else:
                assert seconds < LONG, f"{other}, {'backward' if part else 'forward'}"


@pytest.mark.parametrize("backward", [False, True])
def test_waiting_for_others_is_no_time_of_a_module(backward: bool) -> None:
    model, recorder = Small(), Recorder()
    slowed(model.get_submodule("blocks.1.mlp"), Slow(recorder, waits=True), backward)
    assert max(max(pair) for pair in looked_at(model, recorder).values()) < LONG


def test_hooks_go_again_and_no_bit_changes() -> None:
    torch.manual_seed(0)
    model = Small()
    model(torch.arange(6)).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    times = ModuleTimes({0: model}, Recorder(), torch.device("cpu"))
    times.stepped(1, 10.0)
    times.begin()
    assert any(m._forward_hooks for m in model.modules())
    model(torch.arange(6)).backward()
    assert all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True) if p.grad is not None
    )
    times.modules.clear()  # no look after this one
    times.stepped(2, 10.0)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    lost = ModuleTimes({0: model}, Recorder(), torch.device("cpu"))
    lost.stepped(1, 10.0)
    lost.begin()
    lost.close()
    assert not any(m._forward_hooks for m in model.modules()), "a rank that leaves within a step leaves none"


@pytest.mark.parametrize("seconds", [0.003, 0.2, 2.0])
def test_looks_are_at_the_same_steps_and_rare(seconds: float) -> None:
    """About one a second at first, whatever a step takes; ranks whose steps take a little longer look at the same ones."""
    looks = []
    for longer in (1.0, 1.1):
        recorder = Recorder()
        times = ModuleTimes({0: Small()}, recorder, torch.device("cpu"))
        seen = set()
        for step in range(1, 2001):
            times.stepped(step, seconds * longer)
            times.begin()
            seen |= {step + 1} if times._look is not None else set()
        looks.append(seen)
    assert looks[0] <= looks[1] or looks[1] <= looks[0]
    apart = 2000 / max(1, len(looks[0])) * seconds
    assert apart >= min(1.0, 2.0 * seconds) * 0.99 and apart <= max(2.1, seconds * 1.01)


def test_compiled_modules_are_left_alone() -> None:
    model = Small()
    model._compiled_call_impl = lambda: None
    assert not ModuleTimes({0: model}, Recorder(), torch.device("cpu")).modules
