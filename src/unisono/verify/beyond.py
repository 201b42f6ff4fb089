"""The stretch of a plan beside that of one device: the first thing that is wrong, and its likely cause.

A plan that promises EXACT must have the same bits. Elsewhere a twin of the one device says how far rounding may take
the plan (`twin.py`).

Where a codec may lose half of a gradient, the runs are not compared from step to step (`Bounds.parts_runs`): the steps
that are made and their samples and rates are.

What a run saves and goes on from is compared with itself, to the last bit: the same tensors under another cut, the same
step, rate and samples.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unisono.plan import Plan
from unisono.spec.words import listed
from unisono.train.state.checkpoint import Box, load, read_full, tensor_names
from unisono.verify.bounds import rhythm_of, steps_of
from unisono.verify.compare import Divergence
from unisono.verify.evidence import Cause, axis_text
from unisono.verify.play import record_of
from unisono.verify.record import Record
from unisono.verify.room import CompareTerms, GradientRoom
from unisono.verify.stretch import ROW, StretchRecord, met_by, saved_by
from unisono.verify.twin import RunTolerance, apart, gap, largest

Fault = tuple[Divergence, Cause]
ADDED = 1e-12
"""Relative: what numbers of an update, such as the means of a noise scale, may differ by under a plan that is EXACT.
They are sums of float64 over ranks, in the order of these."""


def beyond(
    terms: CompareTerms, plan: Plan, leaves: int, steps: int, folder: Path, reference: Path, twin: Path | None
) -> Iterator[Fault]:
    """leaves: of a global batch. steps: those compared before, an update each. twin: where the twin's stretch lies;
    None if EXACT."""
    (alone,) = met_by(reference, 1)
    (other,) = (alone,) if twin is None else met_by(twin, 1)
    reach, norm, steps_made = 0.0, 0.0, steps_of(plan, steps + ROW).start
    if twin is not None and terms.bounds.lost:
        reach = _reach(saved_by(reference, steps_made), saved_by(twin, steps_made), alone)
        norm = GradientRoom.beside(terms, Record(record_of(reference, steps - 1))).of_norm()
    look = _Stretch(terms, plan, leaves, steps_of(plan, steps).start, alone, other, reach, norm)
    seen = met_by(folder, plan.world)
    for rank, met in enumerate(seen):
        yield from look.row(rank, met)
    for rank, met in enumerate(seen):
        yield from look.validation(rank, met)
    yield from look.saved(
        saved_by(folder, steps_made), saved_by(reference, steps_made), twin and saved_by(twin, steps_made)
    )
    for rank, met in enumerate(seen):
        yield from look.resumed(rank, met)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """first: the step with which the stretch begins. reach: how far a codec may take the loss, in nats. norm: how far
    it may take the norm in a single step, relative to it: its errors need not be random, as those of rounding are."""

    terms: CompareTerms
    plan: Plan
    leaves: int
    first: int
    alone: StretchRecord
    twin: StretchRecord
    reach: float
    norm: float

    @property
    def tolerance(self) -> RunTolerance:
        paced = self.terms.train.optimiser().paced
        return RunTolerance(self.terms.bounds, self.terms.exact, self.leaves, paced)

    def row(self, rank: int, met: StretchRecord) -> Iterator[Fault]:
        """Compare the steps from the plan's own state: the samples that they read, then their numbers."""
        for i in range(ROW * rhythm_of(self.plan)):
            step = self.first + i
            if i >= len(met.steps) or met.steps[i]["step"] != step:
                text = f"rank {rank} does not come to step {step}"
                yield self._fault(i, "step", text, Cause("lost_between_steps", text))
                return
            got, want, twin = met.steps[i], self.alone.steps[i], self.twin.steps[i]
            if not {tuple(pair) for pair in got["read"]} <= {tuple(pair) for pair in want["read"]}:
                text = f"rank {rank} reads samples in step {step} that one device does not, at the end of an epoch"
                yield self._fault(i, "data", text, Cause("wrong_samples", text))
            for kind in ("lr",) if self.terms.bounds.parts_runs else ("lr", "loss", "norm"):
                size = want["size"] if kind == "loss" else 0.0
                room = self._room(kind, twin[kind], want[kind], size)
                if not apart(got[kind], want[kind], size) <= room:
                    text = f"{kind} on rank {rank} is {got[kind]:.9g} instead of {want[kind]:.9g}"
                    yield self._fault(i, kind, text, self._lost(text))

    def _room(self, kind: str, pushed: float, want: float, size: float = 0.0) -> float:
        """Return how far a number may be off, relative to what it should be, or to its size."""
        reach = self.reach / max(abs(want), size) if kind == "loss" and want else 0.0
        drift = apart(pushed, want, size)
        drifted = self.tolerance.number(kind, drift) + (self.norm if kind == "norm" else 0.0)
        return max(drifted, self.tolerance.number(kind, 0.0) + reach)

    def validation(self, rank: int, met: StretchRecord) -> Iterator[Fault]:
        """Compare loss and metrics of the validation."""
        for name, want in () if self.terms.bounds.parts_runs else self.alone.validation.items():
            got = met.validation.get(name, torch.nan)
            room = self._room("loss", self.twin.validation[name], want)
            if not apart(got, want) <= room:
                text = axis_text(got / want, self.plan, self.leaves) if want else ""
                about = f", {text} times as much" if text else ""
                what = f"validation {name} on rank {rank} is {got:.9g} instead of {want:.9g}{about}"
                yield self._fault(ROW, "loss", what, Cause("validation", f"training is right, {what}"))

    def saved(self, mine: Path, right: Path, twin: Path | None) -> Iterator[Fault]:
        """Compare the checkpoint after the steps in a row."""
        names = tensor_names(mine)
        state = read_full(mine, names)
        for name in _read_otherwise(mine, state):
            text = f"{name}, read back in parts, is not what is read as a whole"
            yield self._fault(ROW, "checkpoint", text, Cause("checkpoint", text))
        state = _added(state, self.terms.owners)
        pushed: Mapping[str, Tensor] = {} if twin is None else read_full(twin)
        wanted = read_full(right)
        learnt = {n.removeprefix("optim/").rpartition("/")[0] for n in wanted if n.startswith("optim/")}
        gaps = _gaps(pushed, wanted, learnt)
        # Where a codec leaves the sign of an entry's gradient open, an optimiser such as Adam moves it either way, as
        # far as any other. Which entries these are is chance, and the twin is one draw of it.
        moved = max(gaps.values(), default=0.0) if self.terms.bounds.lost else 0.0
        furthest = max((x / largest(wanted[f"model/{name}"]) for name, x in gaps.items()), default=0.0)
        still = _still(wanted, self.terms.bounds.most)
        for name, want in wanted.items():
            if name not in state:
                text = f"{name} is not in the checkpoint"
                yield self._fault(ROW, "checkpoint", text, Cause("checkpoint", text))
            elif name.startswith("scaler/") and not self.terms.exact:
                continue  # of fp16: which steps overflow follows from rounding, and a power of two rounds nothing
            elif not self.terms.bounds.parts_runs and want.numel() and not torch.equal(state[name], want):
                error = gap(state[name], want) / largest(want)
                kind, _, parameter = name.partition("/")
                is_weight = kind in ("model", "ema")  # an average of weights goes where these go
                follows = is_weight and (parameter not in learnt or parameter in still)
                apart_by = max(gap(pushed[name], want), moved * is_weight) if twin else 0.0
                drift = max(apart_by / largest(want), furthest * follows)
                number, least = name.startswith("update/"), self._least(name, want)
                room = max(self.tolerance.tensor(name, drift, ROW + 1), least)
                if not error <= room or (self.terms.exact and not number):
                    text = f"{name} is off by {error:.1e} of its largest entry after {ROW + 1} steps in a row"
                    yield self._fault(ROW - 1, "checkpoint", text, self._lost(text))

    def _least(self, name: str, want: Tensor) -> float:
        """Return how far a tensor of the checkpoint may be off at least, whatever the twin's."""
        bounds, (on_its_way, flying, _) = self.terms.bounds, name.removeprefix("sync/").rpartition("/flight")
        if not want.is_floating_point():
            return (ROW + 1) * bounds.vote / largest(want)
        if flying:  # a sum that waits for its update; the twin's are pushed when that is made
            return bounds.spread * bounds.of(on_its_way)
        if name.startswith("update/"):
            return max(ADDED, self.tolerance.number("lr", 0.0))
        return 0.0

    def resumed(self, rank: int, met: StretchRecord) -> Iterator[Fault]:
        """Compare what was read back with what was saved."""
        if met.resumed:
            text = f"resumed, rank {rank} has another {listed(met.resumed, 3)} than it had"
            yield self._fault(ROW, "resume", text, Cause("resume", text))

    def _lost(self, text: str) -> Cause:
        return Cause(
            "lost_between_steps", f"each step alone is right, steps in a row are not: {text}; what is kept from"
            " step to step is lost, or what should be dropped is kept"
        )  # fmt: skip

    def _fault(self, at: int, kind: str, what: str, cause: Cause) -> Fault:
        return Divergence(self.first + at, kind, "", 0.0, f"in a row: {what}"), cause


def _added(state: Mapping[str, Tensor], owners: Mapping[str, str]) -> dict[str, Tensor]:
    """A checkpoint in which what a policy keeps of the uses of a tied weight is added up, as it is where one rank has
    both."""
    whole = dict(state)
    for alias, owner in owners.items():
        for name in [name for name in state if name.startswith(f"sync/{alias}/")]:
            key = name.replace(f"sync/{alias}/", f"sync/{owner}/", 1)
            if key in whole:
                whole[key] = whole[key] + whole.pop(name)
    return whole


def _read_otherwise(folder: Path, wholes: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that, read in two uneven parts of their rows or columns, differ from the whole."""
    wrong: list[str] = []
    for dim in (0, 1):
        copies = {n: torch.empty_like(x) for n, x in wholes.items() if x.dim() > dim and x.shape[dim] > 1}
        parts: list[Box] = []
        for name, x in copies.items():
            cut = (2 * x.shape[dim] + 4) // 5
            for start, size in ((0, cut), (cut, x.shape[dim] - cut)):
                at = tuple(start if d == dim else 0 for d in range(x.dim()))
                parts.append(Box(name, tuple(x.shape), at, x.narrow(dim, start, size)))
        load(folder, parts)
        wrong += [name for name, x in copies.items() if not torch.equal(x, wholes[name])]
    return wrong


def _reach(right: Path, twin: Path, alone: StretchRecord) -> float:
    """How far a codec may take the loss, in nats: to first order, the norm of its gradient times how far the twin's
    weights are (Cauchy-Schwarz). How far one push takes the loss itself is chance, and may be next to nothing."""
    names = [name for name in tensor_names(right) if name.startswith("model/")]
    wanted, pushed = read_full(right, names), read_full(twin, names)
    squares = sum(
        ((pushed[name].double() - want.double()) ** 2).sum().item() for name, want in wanted.items()
    )
    return max(step["norm"] for step in alone.steps) * math.sqrt(squares)


def _gaps(
    pushed: Mapping[str, Tensor], wanted: Mapping[str, Tensor], learnt: Collection[str]
) -> dict[str, float]:
    """Return how far the twin is off in each parameter that learns; nothing without a twin.

    A running statistic follows all parameters before it, some of which, such as a bias before a batch norm, move by
    rounding alone. How far one push of each takes the statistic is chance, so it may go as far as they do.
    """
    names = [name for name in (learnt if pushed else ()) if wanted[f"model/{name}"].numel()]
    return {name: gap(pushed[f"model/{name}"], wanted[f"model/{name}"]) for name in names}


def _still(wanted: Mapping[str, Tensor], bound: float) -> set[str]:
    """Return the parameters whose gradients were rounding alone, by the first moment that an optimiser keeps."""
    ends = ("/exp_avg", "/momentum_buffer")
    tops = {n: x.abs().max().item() for n, x in wanted.items() if n.endswith(ends) and x.numel()}
    least = bound * max(tops.values(), default=0.0)
    return {n.removeprefix("optim/").rpartition("/")[0] for n, top in tops.items() if top <= least}
