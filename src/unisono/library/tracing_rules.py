"""What each of torch's operations makes of the traces of its arguments (`traces`).

A rule takes a `TorchCall` and returns the trace of every output, or of the first alone. Of what has no rule
it is known alone that samples that come first stay first; where they do not, it leaves no trace: nothing is said of it,
and `unisono prove` sees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from unisono.library import tracing_shapes as shapes
from unisono.library.traces import Found, SampleTrace, TorchCall, listed, mixed, together

# Entry by entry. The rest of what torch marks as pointwise bends what it is given.

ADDS = frozenset(
    "add sub rsub neg clone _to_copy to detach alias copy positive lift_fresh real contiguous native_dropout".split()
)
CHOOSES = frozenset("where masked_fill mul div lerp addcmul".split())
SAYS = {"div": "quotient", "mul": "product", "where": "choice", "masked_fill": "choice"}


def pointwise(call: TorchCall) -> Found:
    counts = _is_a_count(call)
    traces = call.tensors("self") if counts else call.tensors()
    trace = together(traces, call.out, SAYS.get(call.name, call.name)) if traces else None
    if trace is None or not trace.reduced:
        return trace
    if trace.undivided and (number := _divisor(call)):
        trace = trace.divided(number, call.ranks)
    if call.name in ADDS:
        return trace
    if call.name not in CHOOSES:
        return trace.bent(call.name)
    lone = len(traces) == 1 and call.of(call.arguments.get("condition", call.arguments.get("mask"))) is None
    numerator = call.name != "div" or call.of(call.arguments.get("self")) is not None
    rounded = call.arguments.get("rounding_mode") is not None
    return trace if lone and numerator and not rounded else trace.bent(SAYS.get(call.name, call.name))


def _is_a_count(call: TorchCall) -> bool:
    """Whether it divides by how many things count: the script has said how many, or all samples count alike."""
    other = call.arguments.get("other")
    trace = call.of(other) if call.name == "div" else None
    if trace is None or trace.dim is not None or not isinstance(other, Tensor) or other.numel() != 1:
        return False
    if other.requires_grad:
        return False
    number = float(other)
    return call.weighed or (not trace.met and number >= trace.samples and not number % trace.samples)


def _divisor(call: TorchCall) -> float:
    """Return the number by which an operation divides; 0 where it divides by none, or by several."""
    sides = (
        [call.arguments.get("other")]
        if call.name == "div"
        else [call.arguments.get("self"), call.arguments.get("other")]
    )
    if call.name not in ("div", "mul"):
        return 0.0
    numbers = [
        float(x)
        for x in sides
        if isinstance(x, (int, float)) or (isinstance(x, Tensor) and _is_constant(call, x))
    ]
    number = numbers[0] if numbers else 0.0
    return number if call.name == "div" or not number else 1 / number


def _is_constant(call: TorchCall, x: Tensor) -> bool:
    return x.numel() == 1 and (call.of(x) is None or (call.name == "div" and _is_a_count(call)))


def summed(call: TorchCall, trace: SampleTrace, numbers: int, mean: bool = False) -> SampleTrace:
    """After a sum over the samples, or a mean of so many numbers. What the script has weighed is a mean already."""
    after = trace.summed("mean" if mean else "sum")
    if call.weighed:
        return after
    if mean:
        return replace(after, terms=(*after.terms, numbers / trace.samples))
    return replace(after, undivided=after.undivided or "a sum over samples")


def overwritten(call: TorchCall) -> Found:
    traces = call.tensors("src")
    return together(traces, call.out, "copy") if traces else None


def emptied(_: TorchCall) -> Found:
    """Overwritten with what is not of the batch."""
    return None


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
    "_cdist_forward": ("x1", "ij", "x2", "kj", "ik"),
    "_euclidean_dist": ("x1", "ij", "x2", "kj", "ik"),
}
DISTANCES = ("_cdist_forward", "_euclidean_dist")


def product(call: TorchCall) -> Found:
    left, i, right, j, out = PRODUCTS[call.name]
    a, b = call.of(call.arguments[left]), call.of(call.arguments[right])
    if a is None and b is None:
        return together(call.tensors("self"), call.out, call.name) if call.tensors("self") else None
    if len(i) != call.arguments[left].dim() or len(j) != call.arguments[right].dim():
        return None
    places = [
        labels[side.dim] for side, labels in ((a, i), (b, j)) if side is not None and side.dim is not None
    ]
    both = [side for side in (a, b) if side is not None]
    trace = next((side for side in both if side.dim is not None), both[0])
    if any(
        (side.batch, side.samples) != (trace.batch, trace.samples) for side in both if side.dim is not None
    ):
        return None
    trace = mixed(trace, [(side, 0) for side in both])
    trace = trace.bent("product") if len(both) > 1 or call.name in DISTANCES else trace
    if not places:
        return trace
    if len(places) == 2 and places[0] == places[1] and both[0].order != both[1].order:
        trace = trace.says(f"{[*both[0].order, *both[1].order][0][0]} of the samples")  # type: ignore[index]
    if len(set(places)) > 1:
        trace = trace.says("product of samples with each other")
    place = out.find(places[0])
    if place < 0:
        return summed(call, trace, 0)
    return trace.at(place) if call.out[place] == trace.extent else None


def attended(call: TorchCall) -> Found:
    names = ("query", "key", "value")
    trace = (
        together(call.tensors(*names), call.arguments["query"].shape, "attention") if call.tensors() else None
    )
    if trace is None or trace.dim is None:
        return None
    trace = trace.bent("attention")
    return (
        trace.says("attention over the samples") if trace.dim == call.arguments["query"].dim() - 2 else trace
    )


# Over dims.


def reduction(linear: bool) -> Callable[[TorchCall], Found]:
    def rule(call: TorchCall) -> Found:
        x = call.arguments["self"]
        trace = call.of(x)
        if trace is None:
            return None
        dims, kept = listed(call.arguments.get("dim"), x.dim()), call.arguments.get("keepdim", False)
        after = trace if linear else trace.bent(call.name)
        if trace.dim in dims and linear:
            after = summed(call, after, x.numel(), "mean" in call.name)
        elif trace.dim in dims:
            after = after.summed(call.name).says(f"{call.name} over the samples")
        elif trace.dim is not None and not kept:
            after = after.at(trace.dim - sum(d < trace.dim for d in dims))
        return [after] * len(call.outs)

    return rule


def along(linear: bool) -> Callable[[TorchCall], Found]:
    """softmax, cumsum, sort: what is made along a dim has as many entries."""

    def rule(call: TorchCall) -> Found:
        x = call.arguments["grad_output"] if "grad_output" in call.arguments else call.arguments["self"]
        traces = call.tensors()
        trace = together(traces, x.shape, call.name)
        if trace is None:
            return None
        trace = trace if linear else trace.bent(call.name)
        if trace.dim in listed(call.arguments.get("dim", -1), x.dim()):
            trace = trace.says(f"{call.name.strip('_')} over the samples")
            trace = (
                trace if trace.dim is None or call.out[trace.dim] == trace.extent else trace.summed(call.name)
            )
        return [trace] * len(call.outs)

    return rule


# Normalisation, losses.


def batch_normalised(call: TorchCall) -> Found:
    trace = call.of(call.arguments["input"])
    if trace is None:
        return None
    training = call.arguments.get(
        "training", call.arguments.get("train", "running_mean" not in call.arguments)
    )
    return trace if not training or trace.dim == 1 else trace.says("batch norm over the samples")


def lossy(call: TorchCall) -> Found:
    """A loss with `reduction`. nll takes classes in the second dim, which its targets lack."""
    x = call.arguments["self"]
    traces = [(part, x.dim() if call.name.startswith("nll") else dims) for part, dims in call.tensors()]
    if call.name.startswith("nll") and any(part.dim for part, _ in traces):
        return None
    weight = call.arguments.get("weight")
    trace = together(traces, x.shape, call.name)
    if trace is None:
        return None
    trace = trace.bent(call.name)
    if isinstance(weight, Tensor) and (by := call.of(weight)) is not None and by.dim is None:
        trace = trace.says(f"weights by a {by.reduced}")
    if call.arguments.get("reduction", 1) == 0 or trace.dim is None:
        return trace
    target = call.arguments.get("target", x)
    after = summed(call, trace, target.numel(), call.arguments.get("reduction", 1) == 1)
    if call.name.startswith("nll") and call.arguments["reduction"] == 1 and not call.weighed:
        total = float(call.outs[1])
        if total != target.numel() and not _same_for_all(
            target, trace.samples, call.arguments["ignore_index"], total
        ):
            after = after.says(
                f"{total:g} of {target.numel()} targets count, the others are ignored or weighted"
            )
    return [after, None]


def _same_for_all(target: Tensor, samples: int, ignored: int, total: float) -> bool:
    """Whether each sample has as many targets that count, and each counts the same."""
    if target.numel() % samples:
        return False
    counts = (target.reshape(samples, -1) != ignored).sum(1).tolist()
    return len(set(counts)) == 1 and sum(counts) == total


def counted(call: TorchCall) -> Found:
    trace = call.of(call.arguments["self"])
    return None if trace is None else trace.summed("count")


def samples_first(call: TorchCall) -> Found:
    """What treats each sample alone and has no other rule: convolutions, pools, norms within a sample."""
    traces = [trace for trace, _ in call.tensors()]
    lead = traces[0]
    alike = all(trace.dim == 0 and trace.batch == lead.batch and not trace.order for trace in traces)
    if not alike or any(trace.extent != trace.samples for trace in traces):
        return None
    after = mixed(lead, [(trace, 0) for trace in traces]).bent(call.name)
    return [after if out.dim() and out.shape[0] == after.samples else None for out in call.outs]


def _each(names: str, rule: Callable[[TorchCall], Found]) -> dict[str, Callable[[TorchCall], Found]]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Callable[[TorchCall], Found]] = {
    **_each(" ".join(ADDS), pointwise),
    **_each("copy", overwritten),
    **_each("fill zero normal uniform bernoulli random exponential log_normal set resize", emptied),
    **_each("view _unsafe_view _reshape_alias reshape", shapes.reshaped),
    **_each("permute", shapes.moved(shapes.permuted)),
    **_each("transpose t", shapes.moved(shapes.transposed)),
    **_each("unsqueeze", shapes.moved(shapes.unsqueezed)),
    **_each("squeeze", shapes.moved(shapes.squeezed)),
    **_each("expand", shapes.moved(shapes.expanded)),
    **_each("select unbind", shapes.moved(shapes.selected)),
    **_each("constant_pad_nd tril triu view_as_real view_as_complex", shapes.moved(shapes.kept)),
    **_each("slice split split_with_sizes chunk", shapes.cut),
    **_each("cat stack", shapes.joined),
    **_each("repeat", shapes.repeated),
    **_each("sum mean nansum nanmean", reduction(True)),
    **_each(
        "amax amin max min argmax argmin aminmax prod std var std_mean var_mean logsumexp norm linalg_vector_norm any "
        "all median nanmedian mode kthvalue count_nonzero _pdist_forward",
        reduction(False),
    ),
    **_each("cumsum", along(True)),
    **_each(
        "_softmax _safe_softmax _log_softmax cumprod cummax cummin logcumsumexp sort argsort topk "
        "_softmax_backward_data _log_softmax_backward_data _fft_r2c _fft_c2c _fft_c2r",
        along(False),
    ),
    **_each("flip roll", shapes.turned),
    **_each("index index_select embedding", shapes.looked_up),
    **_each("gather scatter take_along_dim", shapes.picked),
    **_each(" ".join(PRODUCTS), product),
    **_each(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        attended,
    ),
    **_each(
        "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm _batch_norm_with_update",
        batch_normalised,
    ),
    **_each(
        "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy l1_loss "
        "binary_cross_entropy_with_logits soft_margin_loss multi_margin_loss multilabel_margin_loss_forward",
        lossy,
    ),
    **_each("bincount histc", counted),
}


def traced(call: TorchCall, is_pointwise: bool) -> Sequence[SampleTrace | None]:
    """Return the trace of each output of a call."""
    rule = RULES.get(call.name) or (pointwise if is_pointwise else samples_first)
    result = rule(call)
    results = result if isinstance(result, Sequence) else [result]
    return [*results, *[None] * len(call.outs)][: len(call.outs)]
