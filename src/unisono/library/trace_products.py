"""Rules of products (`trace_rules`): of matrices, of batches of them, convolution, attention."""

from dataclasses import replace

from unisono.library.trace_calls import Found, TorchCall
from unisono.library.traces import together

PRODUCTS = {
    "mm": ("self", "ij", "mat2", "jk", "ik"),
    "addmm": ("mat1", "ij", "mat2", "jk", "ik"),
    "bmm": ("self", "bij", "mat2", "bjk", "bik"),
    "baddbmm": ("batch1", "bij", "batch2", "bjk", "bik"),
    "mv": ("self", "ij", "vec", "j", "i"),
    "addmv": ("mat", "ij", "vec", "j", "i"),
    "dot": ("self", "i", "tensor", "i", ""),
    "vdot": ("self", "i", "other", "i", ""),
}


def product(call: TorchCall) -> Found:
    left, i, right, j, out = PRODUCTS[call.name]
    a, b = call.of(call.given[left]), call.of(call.given[right])
    if a is None and b is None:
        return together(call.tensors("self"), call.out, call.name) if call.tensors("self") else None
    places = [labels[one.dim] for one, labels in ((a, i), (b, j)) if one is not None and one.dim is not None]
    both = [one for one in (a, b) if one is not None]
    made = next((one for one in both if one.dim is not None), both[0])
    if any((one.batch, one.samples) != (made.batch, made.samples) for one in both if one.dim is not None):
        return None
    reduced = next((one.reduced for one in both if one.reduced), "")
    made = replace(made, reduced=reduced, met=next((one.met for one in both if one.met), ""))
    made = made.bent("product") if len(both) > 1 else made
    if not places:
        return made
    if len(places) == 2 and places[0] == places[1] and both[0].order != both[1].order:
        made = made.says(f"{[*both[0].order, *both[1].order][0][0]} of the samples")  # type: ignore[index]
    if len(set(places)) > 1:
        made = made.says("product of samples with each other")
    place = out.find(places[0])
    if place < 0:
        return made.summed("sum")
    return made.at(place) if call.out[place] == made.extent else None


def convolved(call: TorchCall) -> Found:
    trace = call.of(call.given["input"])
    if trace is None or call.of(call.given["weight"]) is not None or trace.dim in (None, 0):
        return trace if trace is None or trace.dim in (None, 0) else None
    return None if trace.dim == 1 else trace.says("convolution over the samples")


def attended(call: TorchCall) -> Found:
    names = ("query", "key", "value")
    trace = together(call.tensors(*names), call.given["query"].shape, "attention") if call.tensors() else None
    if trace is None or trace.dim is None:
        return None
    trace = trace.bent("attention")
    return trace.says("attention over the samples") if trace.dim == call.given["query"].dim() - 2 else trace
