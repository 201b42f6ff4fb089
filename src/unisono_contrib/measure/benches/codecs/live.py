"""Codecs on one process: the group that they send through answers as if all replicas had the same gradients.

Imports torch: rank side only.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.codecs import CODECS, Codec
from unisono.comm.bucket import Bucket
from unisono.comm.collectives import Done, Pending
from unisono.comm.collectives.engine import Engine
from unisono.comm.group import Group
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.spec.errors import UnisonoError
from unisono.sync._drive import Drive
from unisono.train.build.build import Place
from unisono_contrib.measure.benches import Row, compared, spread
from unisono_contrib.measure.hooks import HOOKS, alone_in_a_group, hook_call
from unisono_contrib.measure.turns import in_turns

COPY = "a copy"


class EchoGroup(Group):
    """One rank of `size` whose others have what it has. away: seconds spent here, which are no codec's. first_ns: when
    the first operation was asked for."""

    def __init__(self, size: int) -> None:
        super().__init__("dp", range(size), 0, None, Recorder())
        self.away, self.first_ns = 0.0, 0

    def begin(self) -> None:
        self.away, self.first_ns = 0.0, 0

    def start_all_reduce(self, x: Tensor) -> Pending:
        return self._answered("all_reduce", x, lambda: x)[1]

    def start_all_gather(self, out: Tensor, part: Tensor) -> Pending:
        return self._answered("all_gather", part, lambda: out.view(self.size, -1).copy_(part.view(1, -1)))[1]

    def start_exchange(self, x: Tensor) -> tuple[Tensor, Pending]:
        mine = x.view(self.size, -1)[:1]
        return self._answered("all_to_all", x, lambda: mine.expand(self.size, -1).clone())

    def _answered(self, op: str, x: Tensor, answer: Callable[[], Tensor]) -> tuple[Tensor, Pending]:
        begun = time.perf_counter_ns()
        self.first_ns = self.first_ns or begun
        self.recorder.count(self.axis, op, Engine().sent(op, x.nbytes, self.size))
        result = answer()
        self.away += 1e-9 * (time.perf_counter_ns() - begun)
        return result, Done()


def _gradient(numel: int, device: torch.device) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)


class _Coded:
    """One codec over one bucket. encoded, whole: seconds of each call: to the first operation, and of all that is not
    the group's."""

    def __init__(self, codec: Codec, numel: int, replicas: int, device: torch.device) -> None:
        side = max(1, int(numel**0.5))
        shapes = [(side, side), *([(numel - side * side,)] if numel > side * side else [])]
        params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        self.group, self.bucket = EchoGroup(replicas), Bucket(params, replicas)
        self.drive = Drive(codec.bind(), self.group, {str(i): p for i, p in enumerate(params)})
        self.gradient = _gradient(self.bucket.flat.numel(), device)
        self.declared = codec.work(shapes, 4, replicas).sent
        self.encoded: list[float] = []
        self.whole: list[float] = []

    def __call__(self) -> None:
        self.bucket.flat.copy_(self.gradient)  # new in each step, and not counted as the codec's
        self.group.begin()
        begun = time.perf_counter_ns()
        self.drive.begin(self.bucket)
        self.drive.finish()
        ended = time.perf_counter_ns()
        self.encoded.append(1e-9 * ((self.group.first_ns or ended) - begun))
        self.whole.append(1e-9 * (ended - begun) - self.group.away)


def rows(ctx: RankContext, place: Place, question: Mapping[str, Any]) -> list[Row]:
    """One for each size and codec, and for torch's hooks; of one that does not run here, one that says why. Ranks that
    others started all play it, each for itself."""
    alone = alone_in_a_group(ctx.rank)
    return [row for nbytes in question["sizes"] for row in _of_size(nbytes, place.device, alone, question)]


def _of_size(
    nbytes: int, device: torch.device, alone: dist.ProcessGroup, question: Mapping[str, Any]
) -> list[Row]:
    numel, skipped = max(1, nbytes // 4), {}
    coded: dict[str, _Coded] = {}
    for text in question["members"]:
        try:
            timed_codec = _Coded(CODECS.read(text), numel, question["replicas"], device)
            timed_codec()
        except (UnisonoError, RuntimeError, ValueError) as error:
            skipped[text] = str(error).splitlines()[0]
            continue
        coded[text] = timed_codec
    hooks: dict[str, Callable[[], object]] = {}
    for name in HOOKS:
        try:
            hooks[name] = hook_call(name, _gradient(numel, device), alone)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            skipped[name] = str(error).splitlines()[0]
    return _timed(numel, device, question, coded, hooks) + [
        _not_run(name, why) for name, why in skipped.items()
    ]


def _timed(
    numel: int, device: torch.device, question: Mapping[str, Any], coded: Mapping[str, _Coded],
    hooks: Mapping[str, Callable[[], object]],
) -> list[Row]:  # fmt: skip
    source, target = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    ways: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(source)}
    for text, timed_codec in coded.items():
        ways[text] = timed_codec
    times = in_turns({**ways, **hooks}, device, question["seconds"])
    turns = len(times[COPY])
    fp32 = Engine().sent("all_reduce", 4 * numel, question["replicas"])
    rows: list[Row] = []
    for text, timed_codec in coded.items():
        encoded, whole = timed_codec.encoded[-turns:], timed_codec.whole[-turns:]
        sent = _sent(timed_codec)
        both = {COPY: times[COPY], "encode": encoded, "whole": whole}
        rows.append(
            {
                "codec": text, "bytes": 4 * numel, "replicas": question["replicas"], **spread(whole),
                "encode_seconds": spread(encoded)["seconds"], "turns": turns, "sent_bytes": sent,
                "declared_bytes": timed_codec.declared, "ratio_vs_copy": compared(both, "encode", COPY),
                "whole_ratio_vs_copy": compared(both, "whole", COPY), "ratio_vs_fp32": sent / fp32,
                "skipped": None,
            }
        )  # fmt: skip
    for name in hooks:
        whole = compared(times, name, COPY)
        rows.append(
            {
                "codec": name, "bytes": 4 * numel, "replicas": 1, **spread(times[name]), "encode_seconds": None,
                "turns": turns, "sent_bytes": None, "declared_bytes": None, "ratio_vs_copy": None,
                "whole_ratio_vs_copy": whole, "ratio_vs_fp32": None, "skipped": None,
            }
        )  # fmt: skip
    return rows


def _sent(timed_codec: _Coded) -> int:
    before = sum(timed_codec.group.recorder.bytes().values())
    timed_codec()
    return sum(timed_codec.group.recorder.bytes().values()) - before


def _not_run(name: str, why: str) -> Row:
    return {"codec": name, "skipped": why, "ratio_vs_copy": None}
