"""CPU seconds of each codec's own kernels on one core, beside what the planner prices them at.

    python benchmarks/codec_kernels.py FILE      which `unisono calibrate --out FILE` has written

A codec's exchange is played with what another replica would send replaced by its own; the time of these copies does not
count.
"""

import sys
import time
from math import prod
from typing import Any

import torch

from unisono.codecs import CODECS, BucketMemory, Codec, Deal, Gather, Sent, Sum
from unisono.planner.clusters import cluster
from unisono.planner.host_data import kernels

SHAPES = [(1024, 1024)] * 4
TEXTS = (
    "cast:bf16", "int8", "int8+ef", "int4+ef", "sign+ef", "qsgd", "topk:ratio=0.01+ef", "threshold:ratio=0.02+ef",
    "randomk:ratio=0.1", "block:ratio=0.1", "powersgd:r=4+ef",
)  # fmt: skip
TURNS = 5


def answered(request: Any) -> Any:
    """As if two replicas had the same to say."""
    match request:
        case tuple():
            return tuple(map(answered, request))
        case Sum():
            return request.tensor
        case Gather():
            out = (
                request.into
                if request.into is not None
                else request.tensor.new_empty(2 * request.tensor.numel())
            )
            out.view(2, -1).copy_(request.tensor.view(1, -1).expand(2, -1))
            return out.view(2, -1)
        case Deal():
            return request.tensor.view(2, -1).clone()
        case Sent():
            return None
    raise TypeError(f"no request: {request}")


def seconds_of(codec: Codec) -> float:
    """The least of some exchanges of one bucket."""
    coder, names = codec.bind(), tuple(f"p{i}" for i in range(len(SHAPES)))
    numel, best = sum(map(prod, SHAPES)), float("inf")
    alike = [coder.alike(name, torch.empty(shape)) for name, shape in zip(names, SHAPES, strict=True)]
    memory = BucketMemory({key: torch.zeros(numel) for key in coder.keeps}, alike, names, replicas=2)
    for _ in range(TURNS):
        grad, beside, answer = torch.randn(numel), 0.0, None
        begun = time.thread_time()
        exchange = coder.exchange(grad, [torch.Size(shape) for shape in SHAPES], memory)
        try:
            while True:
                request = exchange.send(answer)
                asked = time.thread_time()
                answer = answered(request)
                beside += time.thread_time() - asked
        except StopIteration:
            best = min(best, time.thread_time() - begun - beside)
        memory.step += 1
    return best


def main() -> None:
    torch.set_num_threads(1)
    host = cluster(sys.argv[1]).host if len(sys.argv) > 1 else None
    if host is None:
        raise SystemExit("give the file of unisono calibrate, on a machine without GPUs")
    pace = host.forward
    print(f"{'codec':<26}{'measured':>12}{'priced':>12}{'ratio':>8}")
    for text in TEXTS:
        codec = CODECS.read(text)
        took, told = (
            seconds_of(codec),
            kernels(codec, codec.work(tuple(SHAPES), 4, 2), pace.elementwise, pace.product),
        )
        print(f"{text:<26}{1e3 * took:>9.2f} ms{1e3 * told:>9.2f} ms{told / took:>8.2f}")


if __name__ == "__main__":
    main()
