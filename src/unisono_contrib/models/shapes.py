"""What operators that change shapes say of axes: which dims of the result are which of the operand."""

import torch

from unisono_contrib.models.axes import Dim, Misfit, OperatorCall, Results, at_of


def view(call: OperatorCall) -> Results:
    (x,) = (call.dims(n) for n in call.tensors)
    return [call.axes.regrouped(x, call.shapes[0])]


def permuted(call: OperatorCall) -> Results:
    x, name = list(call.dims(call.args["self"])), call.name
    if name == "permute":
        return [tuple(x[d] for d in call.args["dims"])]
    if name in ("t", "numpy_T", "mT", "adjoint"):
        if len(x) == 2:
            x.reverse()
        return [tuple(x)]
    if name == "movedim":
        source, target = call.args["source"], call.args["destination"]
        pairs = [(source, target)] if isinstance(source, int) else list(zip(source, target, strict=True))
        moved = {at_of(t, x): x[at_of(s, x)] for s, t in pairs}
        rest = iter([d for i, d in enumerate(x) if i not in {at_of(s, x) for s, _ in pairs}])
        return [tuple(moved[i] if i in moved else next(rest) for i in range(len(x)))]
    keys = ("axis0", "axis1") if "axis0" in call.args else ("dim0", "dim1")
    a, b = (at_of(call.args[k], x) for k in keys)
    x[a], x[b] = x[b], x[a]
    return [tuple(x)]


def expand(call: OperatorCall) -> Results:
    x, shape = call.dims(call.args["self"]), call.shapes[0]
    lead = len(shape) - len(x)
    grown = [() if i < lead else x[i - lead] for i in range(len(shape))]
    return [tuple(d if call.axes.known(d) else call.axes.new(n) for d, n in zip(grown, shape, strict=True))]


def repeat(call: OperatorCall) -> Results:
    x, shape = call.dims(call.args["self"]), call.shapes[0]
    lead = len(shape) - len(x)
    out: list[Dim] = []
    for i, size in enumerate(shape):
        axes = x[i - lead] if i >= lead else ()
        out.append((*call.axes.new(size // call.axes.size(call.axes.known(axes))), *axes))
    return [tuple(out)]


def repeat_interleave(call: OperatorCall) -> Results:
    x = list(call.dims(call.args["self"]))
    if not isinstance(call.args.get("repeats"), int) or call.args.get("dim") is None:
        raise Misfit
    at = at_of(call.args["dim"], x)
    x[at] = (*x[at], *call.axes.new(call.args["repeats"]))
    return [tuple(x)]


def select(call: OperatorCall) -> Results:
    x = list(call.dims(call.args["self"]))
    call.whole([x.pop(at_of(call.args["dim"], x))])
    return [tuple(x)]


def pieces(call: OperatorCall) -> Results:
    """Slices, splits and chunks: pieces of one size are a direction of their own, if they fit."""
    x = list(call.dims(call.args["self"]))
    at = at_of(call.args.get("dim", 0), x)
    if call.name == "unbind":
        call.whole([x.pop(at)])
        return [tuple(x)] * len(call.shapes)
    sizes = {shape[at] for shape in call.shapes}
    full = call.axes.size(call.axes.known(x[at]))
    if sizes == {full}:
        return [tuple(x)] * len(call.shapes)
    start = call.args.get("start") or 0
    if len(sizes) > 1 or call.args.get("step", 1) != 1 or start % min(sizes):
        raise Misfit
    pieces, x[at] = call.axes.folded(x[at], min(sizes))
    call.whole([pieces])
    return [tuple(x)] * len(call.shapes)


def joined(call: OperatorCall) -> Results:
    parts = [call.dims(n) for n in call.args["tensors"]]
    first, dim = parts[0], call.args.get("dim", 0)
    stacked = call.name == "stack"
    at = dim % (len(first) + stacked)
    for other in parts[1:]:
        for d, (a, b) in enumerate(zip(first, other, strict=True)):
            if stacked or d != at:
                call.axes.same(a, b)
    if stacked:
        return [(*first[:at], call.axes.new(len(parts)), *first[at:])]
    call.whole([part[at] for part in parts])
    return [(*first[:at], call.axes.new(call.shapes[0][at]), *first[at + 1 :])]


def window(call: OperatorCall) -> Results:
    """Pooling and resizing: samples and channels stay, places inside a map are seen by their neighbours."""
    (x, *_) = (call.dims(n) for n in call.tensors)
    if len(x) < 3:
        raise Misfit
    call.whole(x[2:])
    return [(*x[:2], *call.axes.fresh(shape[2:])) for shape in call.shapes]


def padded(call: OperatorCall) -> Results:
    x, shape = list(call.dims(call.args["self"])), call.shapes[0]
    for i, dim in enumerate(x):
        if call.axes.size(call.axes.known(dim)) != shape[i]:
            call.whole([dim])
            x[i] = call.axes.new(shape[i])
    return [tuple(x)]


def indexed(call: OperatorCall) -> Results:
    """One dim looked up by an index, such as `table[index]`; the others stay."""
    x, indices = call.dims(call.args["self"]), call.args["indices"]
    indexed_dims = [i for i, index in enumerate(indices) if index is not None]
    if len(indexed_dims) != 1 or indices[indexed_dims[0]].meta["val"].dtype == torch.bool:
        raise Misfit
    call.whole([x[indexed_dims[0]], *call.dims(indices[indexed_dims[0]])])
    return [(*x[: indexed_dims[0]], *call.dims(indices[indexed_dims[0]]), *x[indexed_dims[0] + 1 :])]


def filled(call: OperatorCall) -> Results:
    """Made from nothing, or only in the likeness of an operand."""
    return [call.axes.fresh(shape) for shape in call.shapes]


def triangle(call: OperatorCall) -> Results:
    x = call.dims(call.args["self"])
    call.whole(x[-2:])
    return [x]
