"""Rules of operations that change where samples lie (`tracing_rules`): shapes, cuts, joins, look-ups."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unisono.library.traces import Found, TorchCall, listed, together, viewed


def reshaped(call: TorchCall) -> Found:
    x = call.arguments["self"]
    trace = call.of(x)
    return None if trace is None else viewed(trace, x.shape, call.out)


def moved(where: Callable[[TorchCall, int, int], int | None]) -> Callable[[TorchCall], Found]:
    """A rule of an operation that puts dims elsewhere. where(call, dim, dims): where a dim is then; None: nowhere."""

    def rule(call: TorchCall) -> Found:
        x = call.arguments["self"]
        trace = call.of(x)
        if trace is None or trace.dim is None:
            return trace
        dim = where(call, trace.dim, x.dim())
        if dim is None or not dim < len(call.out) or call.out[dim] != trace.extent:
            return None
        return [trace.at(dim)] * len(call.outs)

    return rule


def permuted(call: TorchCall, dim: int, dims: int) -> int:
    return listed(call.arguments["dims"], dims).index(dim)


def transposed(call: TorchCall, dim: int, dims: int) -> int:
    a, b = (listed(call.arguments.get(name, i), dims)[0] for i, name in enumerate(("dim0", "dim1")))
    return {a: b, b: a}.get(dim, dim) if dims > 1 else dim


def unsqueezed(call: TorchCall, dim: int, dims: int) -> int:
    return dim + (call.arguments["dim"] % (dims + 1) <= dim)


def squeezed(call: TorchCall, dim: int, dims: int) -> int | None:
    x = call.arguments["self"]
    gone = [d for d in listed(call.arguments.get("dim"), dims) if x.shape[d] == 1]
    return None if dim in gone else dim - sum(d < dim for d in gone)


def expanded(call: TorchCall, dim: int, dims: int) -> int:
    return dim + len(call.out) - dims


def selected(call: TorchCall, dim: int, dims: int) -> int | None:
    gone = call.arguments["dim"] % dims
    return None if gone == dim else dim - (gone < dim)


def kept(call: TorchCall, dim: int, dims: int) -> int:
    return dim


def cut(call: TorchCall) -> Found:
    """slice, split: of the samples' dim, whole sets of samples or nothing that is known."""
    x = call.arguments["self"]
    trace, dim = call.of(x), call.arguments.get("dim", 0) % max(x.dim(), 1)
    if trace is None or trace.dim != dim:
        return [trace] * len(call.outs)
    set_, step = trace.samples * trace.inner, call.arguments.get("step", 1)
    start, traces = call.arguments.get("start") or 0, []
    start = max(0, start + x.shape[dim] if start < 0 else start)
    for out in call.outs:
        size = out.shape[dim]
        whole = step == 1 and not start % set_ and size and not size % set_
        traces.append(replace(trace, outer=size // set_) if whole else None)
        start += size
    return traces


def joined(call: TorchCall) -> Found:
    """cat, stack."""
    parts, stacks = call.arguments["tensors"], call.name == "stack"
    dims = len(call.out)
    dim, traces = call.arguments.get("dim", 0) % max(dims, 1), call.tensors()
    if stacks:
        traces = [
            (part if part.dim is None else part.at(part.dim + (dim <= part.dim)), dims) for part, _ in traces
        ]
    along = [part for part, _ in traces if part.dim == dim]
    if not along:
        return together(traces, call.out, call.name)
    first = along[0]
    if len(along) < len(parts) or any(part != first for part in along) or first.outer > 1:
        return None
    return replace(first, outer=len(parts))


def repeated(call: TorchCall) -> Found:
    x, times = call.arguments["self"], call.arguments["repeats"]
    trace = call.of(x)
    if trace is None or trace.dim is None:
        return trace
    dim = trace.dim + len(times) - x.dim()
    return replace(trace, dim=dim, outer=trace.outer * times[dim])


def turned(call: TorchCall) -> Found:
    """flip, roll: the samples are there, in another order."""
    x = call.arguments["self"]
    trace = call.of(x)
    if trace is None or trace.dim not in listed(call.arguments["dims"], x.dim()):
        return trace
    return replace(trace, order=(*trace.order, (call.name, repr(call.arguments.get("shifts", "")))))


def looked_up(call: TorchCall) -> Found:
    """x[index] with one index, index_select, embedding."""
    x, index, dim = _index_of(call)
    if index is None or index.dtype in (torch.bool, torch.uint8):
        return None
    trace, by = call.of(x), call.of(index)
    if trace is None:
        return by.at(by.dim + dim) if by is not None and by.dim is not None else by
    if by is not None:
        if trace.dim is not None or by.dim is None:
            return None
        return replace(by, dim=by.dim + dim, reduced=trace.reduced, met=trace.met).bent("choice")
    if trace.dim is None:
        return trace
    if trace.dim != dim:
        return trace.at(trace.dim + (index.dim() - 1 if trace.dim > dim else 0))
    if index.dim() == 1 and len(index) == trace.extent and trace.inner == trace.outer == 1:
        return replace(trace, order=(*trace.order, ("a permutation", id(index))))
    return None


def _index_of(call: TorchCall) -> tuple[Any, Tensor | None, int]:
    if call.name == "embedding":
        return call.arguments["weight"], call.arguments["indices"], 0
    if call.name == "index_select":
        return (
            call.arguments["self"],
            call.arguments["index"],
            call.arguments["dim"] % call.arguments["self"].dim(),
        )
    several = [(i, index) for i, index in enumerate(call.arguments["indices"]) if index is not None]
    return (
        call.arguments["self"],
        (several[0][1] if len(several) == 1 else None),
        (several or [(0, None)])[0][0],
    )


def picked(call: TorchCall) -> Found:
    """gather, scatter: by places along a dim, of each sample alone if that is not theirs."""
    index = call.arguments["index"]
    trace = together(call.tensors(), index.shape, call.name)
    if trace is None or trace.dim is None or trace.dim == call.arguments["dim"] % max(index.dim(), 1):
        return None
    return (
        trace.bent(call.name) if trace.dim < len(call.out) and call.out[trace.dim] == trace.extent else None
    )
