"""What each of torch's operations makes of the traces of its arguments (`traces`).

A rule takes a `TorchCall` and returns the trace of every output, or of the first alone. What has no rule leaves no
trace: nothing is said of it, and `unisono prove` sees it.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from unisono.library import trace_shapes as shapes
from unisono.library.trace_calls import Found, TorchCall, listed
from unisono.library.trace_products import PRODUCTS, attended, convolved, product
from unisono.library.traces import SampleTrace, together

# Entry by entry. The rest of what torch marks as pointwise bends what it is given.

ADDS = frozenset(
    "add sub rsub neg clone _to_copy to detach alias copy positive lift_fresh real contiguous native_dropout".split()
)
CHOOSES = frozenset("where masked_fill mul div lerp addcmul".split())
SAYS = {"div": "quotient", "mul": "product", "where": "choice", "masked_fill": "choice"}


def pointwise(call: TorchCall) -> Found:
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


def _is_a_count(call: TorchCall) -> bool:
    """Whether it divides by how many things count: the script has said how many, or all samples count alike."""
    other = call.given.get("other")
    trace = call.of(other) if call.name == "div" else None
    if trace is None or trace.dim is not None or not isinstance(other, Tensor) or other.numel() != 1:
        return False
    if other.requires_grad:
        return False
    number = float(other)
    return call.weighed or (not trace.met and number >= trace.samples and not number % trace.samples)


def overwritten(call: TorchCall) -> Found:
    traces = call.tensors("src")
    return together(traces, call.out, "copy") if traces else None


def emptied(_: TorchCall) -> Found:
    """Overwritten with what is not of the batch."""
    return None


# Over dims.


def reduction(linear: bool) -> Callable[[TorchCall], Found]:
    def rule(call: TorchCall) -> Found:
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


def along(linear: bool) -> Callable[[TorchCall], Found]:
    """softmax, cumsum, sort: what is made along a dim has as many entries."""

    def rule(call: TorchCall) -> Found:
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


# Normalisation, pools, losses.


def normalised(call: TorchCall) -> Found:
    """Over the last dims, of each sample alone."""
    x = call.given["input"]
    trace = call.of(x)
    if trace is None or trace.dim is None:
        return trace and trace.bent("norm")
    inside = trace.dim >= x.dim() - len(call.given["normalized_shape"])
    return trace.says("layer norm over the samples") if inside else trace.bent("norm")


def grouped(call: TorchCall) -> Found:
    trace = call.of(call.given["input"])
    return trace.bent("norm") if trace is not None and trace.dim == 0 else None


def batch_normalised(call: TorchCall) -> Found:
    trace = call.of(call.given["input"])
    if trace is None:
        return None
    training = call.given.get("training", call.given.get("train", "running_mean" not in call.given))
    return trace if not training or trace.dim == 1 else trace.says("batch norm over the samples")


def pooled(call: TorchCall) -> Found:
    x = call.given.get("self", call.given.get("input"))
    trace = call.of(x)
    if trace is None or trace.dim is None or trace.dim >= min(len(call.out) - 1, 2):
        return None
    return [trace.bent("pooling")] * len(call.outs)


def lossy(call: TorchCall) -> Found:
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


def counted(call: TorchCall) -> Found:
    trace = call.of(call.given["self"])
    return None if trace is None else trace.summed("count")


def rule_of(name: str, is_pointwise: bool) -> Callable[[TorchCall], Found] | None:
    """The rule of an operation, if there is one."""
    return RULES.get(name) or (pointwise if is_pointwise else None)


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
        "all median nanmedian mode kthvalue count_nonzero",
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


def traced(call: TorchCall, is_pointwise: bool) -> Sequence[SampleTrace | None]:
    """Of each output."""
    rule = rule_of(call.name, is_pointwise)
    if rule is None:
        return [None] * len(call.outs)
    found = rule(call)
    if isinstance(found, Sequence):
        return [*found, *[None] * len(call.outs)][: len(call.outs)]
    return [found, *[None] * len(call.outs)][: len(call.outs)]
