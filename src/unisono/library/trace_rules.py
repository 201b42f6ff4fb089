"""What each of torch's operations makes of the traces of its arguments (`traces`).

A rule takes a `Call` and returns the trace of every output, or of the first alone. What has no rule leaves no trace:
nothing is said of it, and `unisono prove` sees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.library.traces import Shape, Trace, together, viewed

Found = Trace | None | list[Trace | None]


@dataclass(frozen=True, slots=True)
class Call:
    """name: of the operation, such as `mul`, without the underscore of those in place. given: arguments by name. of:
    the trace of a tensor. outs: what it returned. weighed: whether the script said what its loss counts."""

    name: str
    given: dict[str, Any]
    of: Callable[[Any], Trace | None]
    outs: list[Tensor]
    weighed: bool = False

    @property
    def out(self) -> Shape:
        return self.outs[0].shape

    def tensors(self, *names: str) -> list[tuple[Trace, int]]:
        """Traces of tensors among the arguments, or of those with these names, with their numbers of dims."""
        values = [self.given.get(name) for name in names] if names else list(self.given.values())
        flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
        return [(trace, x.dim()) for x in flat if isinstance(x, Tensor) and (trace := self.of(x)) is not None]


def listed(dims: Any, count: int) -> list[int]:
    """Dims as an argument gives them, counted from the front; all if it gives none."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(count))
    return [d % max(count, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


# Entry by entry. The rest of what torch marks as pointwise bends what it is given.

ADDS = frozenset(
    "add sub rsub neg clone _to_copy to detach alias copy positive lift_fresh real contiguous native_dropout".split()
)
CHOOSES = frozenset("where masked_fill mul div lerp addcmul".split())
SAYS = {"div": "quotient", "mul": "product", "where": "choice", "masked_fill": "choice"}


def pointwise(call: Call) -> Found:
    counts = _is_a_count(call)
    traces = call.tensors("self") if counts else call.tensors()
    made = together(traces, call.out, SAYS.get(call.name, call.name)) if traces else None
    if made is None or not made.reduced or call.name in ADDS:
        return made
    if call.name not in CHOOSES:
        return made.bent(call.name)
    lone = len(traces) == 1 and call.of(call.given.get("condition", call.given.get("mask"))) is None
    numerator = call.name != "div" or call.of(call.given.get("self")) is not None
    rounded = call.given.get("rounding_mode") is not None
    return made if lone and numerator and not rounded else made.bent(SAYS.get(call.name, call.name))


def _is_a_count(call: Call) -> bool:
    """Whether it divides by how many things count: the script has said how many those are, or all samples count alike."""
    other = call.given.get("other")
    trace = call.of(other) if call.name == "div" else None
    if trace is None or trace.dim is not None or other.numel() != 1:
        return False
    number = float(other)
    return call.weighed or (not trace.met and number >= trace.samples and not number % trace.samples)


def emptied(_: Call) -> Found:
    """Overwritten with what is not of the batch."""
    return None


# Shapes.


def reshaped(call: Call) -> Found:
    x = call.given["self"]
    trace = call.of(x)
    return None if trace is None else viewed(trace, x.shape, call.out)


def moved(where: Callable[[Call, int, int], int | None]) -> Callable[[Call], Found]:
    """A rule of an operation that puts dims elsewhere. where(call, dim, dims): where a dim is then; None: nowhere."""

    def rule(call: Call) -> Found:
        x = call.given["self"]
        trace = call.of(x)
        if trace is None or trace.dim is None:
            return trace
        dim = where(call, trace.dim, x.dim())
        if dim is None or not dim < len(call.out) or call.out[dim] != trace.extent:
            return None
        return [trace.at(dim)] * len(call.outs)

    return rule


def _permuted(call: Call, dim: int, dims: int) -> int:
    return listed(call.given["dims"], dims).index(dim)


def _transposed(call: Call, dim: int, dims: int) -> int:
    a, b = (listed(call.given.get(name, i), dims)[0] for i, name in enumerate(("dim0", "dim1")))
    return {a: b, b: a}.get(dim, dim) if dims > 1 else dim


def _unsqueezed(call: Call, dim: int, dims: int) -> int:
    return dim + (call.given["dim"] % (dims + 1) <= dim)


def _squeezed(call: Call, dim: int, dims: int) -> int | None:
    x = call.given["self"]
    gone = [d for d in listed(call.given.get("dim"), dims) if x.shape[d] == 1]
    return None if dim in gone else dim - sum(d < dim for d in gone)


def _expanded(call: Call, dim: int, dims: int) -> int:
    return dim + len(call.out) - dims


def _selected(call: Call, dim: int, dims: int) -> int | None:
    gone = call.given["dim"] % dims
    return None if gone == dim else dim - (gone < dim)


def _kept(call: Call, dim: int, dims: int) -> int:
    return dim


def cut(call: Call) -> Found:
    """slice, split: of the samples' dim, whole sets of samples or nothing that is known."""
    x = call.given["self"]
    trace, dim = call.of(x), call.given.get("dim", 0) % max(x.dim(), 1)
    if trace is None or trace.dim != dim:
        return [trace] * len(call.outs)
    set_, step = trace.samples * trace.inner, call.given.get("step", 1)
    start, found = _start(call, x.shape[dim]), []
    for out in call.outs:
        size = out.shape[dim]
        whole = step == 1 and not start % set_ and size and not size % set_
        found.append(replace(trace, outer=size // set_) if whole else None)
        start += size
    return found


def _start(call: Call, size: int) -> int:
    start = call.given.get("start") or 0
    return max(0, start + size if start < 0 else start)


def joined(call: Call) -> Found:
    """cat, stack."""
    parts, stacks = call.given["tensors"], call.name == "stack"
    dims = len(call.out)
    dim, traces = call.given.get("dim", 0) % max(dims, 1), call.tensors()
    if stacks:
        traces = [(one if one.dim is None else one.at(one.dim + (dim <= one.dim)), dims) for one, _ in traces]
    along = [one for one, _ in traces if one.dim == dim]
    if not along:
        return together(traces, call.out, call.name)
    first = along[0]
    if len(along) < len(parts) or any(one != first for one in along) or first.outer > 1:
        return None
    return replace(first, outer=len(parts))


def repeated(call: Call) -> Found:
    x, times = call.given["self"], call.given["repeats"]
    trace = call.of(x)
    if trace is None or trace.dim is None:
        return trace
    dim = trace.dim + len(times) - x.dim()
    return replace(trace, dim=dim, outer=trace.outer * times[dim])


# Over dims.


def reduction(linear: bool) -> Callable[[Call], Found]:
    def rule(call: Call) -> Found:
        x = call.given["self"]
        trace = call.of(x)
        if trace is None:
            return None
        dims, kept = listed(call.given.get("dim"), x.dim()), call.given.get("keepdim", False)
        after = trace if linear else trace.bent(call.name)
        if trace.dim in dims:
            after = after.summed(call.name)
            after = after if linear else after.says(f"{call.name} over the samples")
        elif trace.dim is not None and not kept:
            after = after.at(trace.dim - sum(d < trace.dim for d in dims))
        return [after] * len(call.outs)

    return rule


def along(linear: bool) -> Callable[[Call], Found]:
    """softmax, cumsum, sort: what is made along a dim has as many entries."""

    def rule(call: Call) -> Found:
        x = call.given["grad_output"] if "grad_output" in call.given else call.given["self"]
        traces = call.tensors()
        trace = together(traces, x.shape, call.name)
        if trace is None:
            return None
        trace = trace if linear else trace.bent(call.name)
        if trace.dim in listed(call.given.get("dim", -1), x.dim()):
            trace = trace.says(f"{call.name.strip('_')} over the samples")
            trace = (
                trace if trace.dim is None or call.out[trace.dim] == trace.extent else trace.summed(call.name)
            )
        return [trace] * len(call.outs)

    return rule


def turned(call: Call) -> Found:
    """flip, roll: the samples are there, in another order."""
    x = call.given["self"]
    trace = call.of(x)
    if trace is None or trace.dim not in listed(call.given["dims"], x.dim()):
        return trace
    return replace(trace, order=(*trace.order, (call.name, repr(call.given.get("shifts", "")))))


def looked_up(call: Call) -> Found:
    """x[index] with one index, index_select, embedding."""
    x, index, dim = _index_of(call)
    if index is None or index.dtype in (torch.bool, torch.uint8):
        return None
    own, by = call.of(x), call.of(index)
    if own is None:
        return by if by is None or by.dim is None else by.at(by.dim + dim)
    if by is not None:
        numbers = own.dim is None and by.dim is not None
        return (
            replace(by.at(by.dim + dim), reduced=own.reduced, met=own.met).bent("choice") if numbers else None
        )
    if own.dim is None:
        return own
    if own.dim != dim:
        return own.at(own.dim + (index.dim() - 1 if own.dim > dim else 0))
    if index.dim() == 1 and len(index) == own.extent and own.inner == own.outer == 1:
        return replace(own, order=(*own.order, ("a permutation", id(index))))
    return None


def _index_of(call: Call) -> tuple[Any, Tensor | None, int]:
    if call.name == "embedding":
        return call.given["weight"], call.given["indices"], 0
    if call.name == "index_select":
        return call.given["self"], call.given["index"], call.given["dim"] % call.given["self"].dim()
    several = [(i, index) for i, index in enumerate(call.given["indices"]) if index is not None]
    return call.given["self"], (several[0][1] if len(several) == 1 else None), (several or [(0, None)])[0][0]


def picked(call: Call) -> Found:
    """gather, scatter: by places along a dim, of each sample alone if that is not theirs."""
    index = call.given["index"]
    trace = together(call.tensors(), index.shape, call.name)
    if trace is None or trace.dim is None or trace.dim == call.given["dim"] % max(index.dim(), 1):
        return None
    return (
        trace.bent(call.name) if trace.dim < len(call.out) and call.out[trace.dim] == trace.extent else None
    )


# Products.

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


def product(call: Call) -> Found:
    left, i, right, j, out = PRODUCTS[call.name]
    a, b = call.of(call.given[left]), call.of(call.given[right])
    if a is None and b is None:
        return together(call.tensors("self"), call.out, call.name) if call.tensors("self") else None
    places = [labels[one.dim] for one, labels in ((a, i), (b, j)) if one is not None and one.dim is not None]
    both = [one for one in (a, b) if one is not None]
    made = next((one for one in both if one.dim is not None), both[0])
    if any(one.batch != made.batch or one.samples != made.samples for one in both):
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


def convolved(call: Call) -> Found:
    trace = call.of(call.given["input"])
    if trace is None or call.of(call.given["weight"]) is not None or trace.dim in (None, 0):
        return trace if trace is None or trace.dim in (None, 0) else None
    return None if trace.dim == 1 else trace.says("convolution over the samples")


def attended(call: Call) -> Found:
    names = ("query", "key", "value")
    trace = together(call.tensors(*names), call.given["query"].shape, "attention") if call.tensors() else None
    if trace is None or trace.dim is None:
        return None
    trace = trace.bent("attention")
    return trace.says("attention over the samples") if trace.dim == call.given["query"].dim() - 2 else trace


# Normalisation, pools, losses.


def normalised(call: Call) -> Found:
    """Over the last dims, of each sample alone."""
    x = call.given["input"]
    trace = call.of(x)
    if trace is None or trace.dim is None:
        return trace and trace.bent("norm")
    inside = trace.dim >= x.dim() - len(call.given["normalized_shape"])
    return trace.says("layer norm over the samples") if inside else trace.bent("norm")


def grouped(call: Call) -> Found:
    trace = call.of(call.given["input"])
    return trace.bent("norm") if trace is not None and trace.dim == 0 else None


def batch_normalised(call: Call) -> Found:
    trace = call.of(call.given["input"])
    if trace is None:
        return None
    training = call.given.get("training", call.given.get("train", "running_mean" not in call.given))
    return trace if not training or trace.dim == 1 else trace.says("batch norm over the samples")


def pooled(call: Call) -> Found:
    x = call.given.get("self", call.given.get("input"))
    trace = call.of(x)
    inside = trace is not None and trace.dim is not None and trace.dim < min(x.dim() - 1, 2)
    return [trace.bent("pooling") if trace else None] * len(call.outs) if inside else None


def lossy(call: Call) -> Found:
    """A loss with `reduction`. nll takes classes in the second dim, which its targets lack."""
    x = call.given["self"]
    traces = [(one, x.dim() if call.name.startswith("nll") else dims) for one, dims in call.tensors()]
    if call.name.startswith("nll") and any(one.dim for one, _ in traces):
        return None
    weight = call.given.get("weight")
    trace = together(traces, x.shape, call.name)
    if trace is None:
        return None
    trace = trace.bent(call.name)
    if isinstance(weight, Tensor) and (by := call.of(weight)) is not None and by.dim is None:
        trace = trace.says(f"weights by a {by.reduced}")
    if call.given.get("reduction", 1) == 0 or trace.dim is None:
        return trace
    return [trace.summed("sum" if call.given["reduction"] == 2 else "mean"), None]


def counted(call: Call) -> Found:
    trace = call.of(call.given["self"])
    return None if trace is None else trace.summed("count")


def rule_of(name: str, is_pointwise: bool) -> Callable[[Call], Found] | None:
    """The rule of an operation, if there is one."""
    return RULES.get(name) or (pointwise if is_pointwise else None)


def _each(names: str, rule: Callable[[Call], Found]) -> dict[str, Callable[[Call], Found]]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Callable[[Call], Found]] = {
    **_each(" ".join(ADDS), pointwise),
    **_each("fill zero normal uniform bernoulli random exponential log_normal set resize", emptied),
    **_each("view _unsafe_view _reshape_alias reshape", reshaped),
    **_each("permute", moved(_permuted)),
    **_each("transpose t", moved(_transposed)),
    **_each("unsqueeze", moved(_unsqueezed)),
    **_each("squeeze", moved(_squeezed)),
    **_each("expand", moved(_expanded)),
    **_each("select unbind", moved(_selected)),
    **_each("constant_pad_nd tril triu", moved(_kept)),
    **_each("slice split split_with_sizes chunk", cut),
    **_each("cat stack", joined),
    **_each("repeat", repeated),
    **_each("sum mean nansum nanmean", reduction(True)),
    **_each(
        "amax amin max min argmax argmin aminmax prod std var std_mean var_mean logsumexp norm linalg_vector_norm any "
        "all median nanmedian mode kthvalue count_nonzero",
        reduction(False),
    ),
    **_each("cumsum", along(True)),
    **_each(
        "_softmax _log_softmax cumprod cummax cummin logcumsumexp sort argsort topk _softmax_backward_data "
        "_log_softmax_backward_data _fft_r2c _fft_c2c _fft_c2r",
        along(False),
    ),
    **_each("flip roll", turned),
    **_each("index index_select embedding", looked_up),
    **_each("gather scatter take_along_dim", picked),
    **_each(" ".join(PRODUCTS), product),
    **_each("convolution", convolved),
    **_each(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        attended,
    ),
    **_each("native_layer_norm _fused_rms_norm rms_norm", normalised),
    **_each("native_group_norm", grouped),
    **_each(
        "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm _batch_norm_with_update",
        batch_normalised,
    ),
    **_each(
        "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_nearest1d",
        pooled,
    ),
    **_each(
        "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy l1_loss "
        "binary_cross_entropy_with_logits soft_margin_loss",
        lossy,
    ),
    **_each("bincount", counted),
}


def traced(call: Call, is_pointwise: bool) -> Sequence[Trace | None]:
    """Of each output."""
    rule = rule_of(call.name, is_pointwise)
    if rule is None:
        return [None] * len(call.outs)
    found = rule(call)
    if isinstance(found, list):
        return [*found, *[None] * len(call.outs)][: len(call.outs)]
    return [found, *[None] * len(call.outs)][: len(call.outs)]
