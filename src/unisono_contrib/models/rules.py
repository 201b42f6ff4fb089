"""What operators say of axes: which dims of their operands and results are the same, which are summed over, and which
have to be whole.

A rule takes an `OperatorCall` and returns the dims of the result, or of each result. An operator that has no rule, or
whose sizes do not fit its rule, bars all axes that it sees: what it reads stays whole.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import Node

from unisono_contrib.models import shapes
from unisono_contrib.models.axes import Dim, Misfit, OperatorCall, Results, at_of, packet


def rule_of(node: Node) -> Callable[[OperatorCall], Results] | None:
    """The rule of a node's operator."""
    if packet(node) in RULES:
        return RULES[packet(node)]
    return _alike if torch.Tag.pointwise in getattr(node.target, "tags", ()) else None


# Element by element ----------------------------------------------------------------------------------------


def _alike(call: OperatorCall) -> Results:
    """Operands are broadcast, dim by dim from the last."""
    shape = call.shapes[0]
    out: list[Dim] = [()] * len(shape)
    for operand in call.tensors:
        dims = call.dims(operand)
        for i in range(1, len(dims) + 1):
            if call.axes.known(dims[-i]):
                if out[-i]:
                    call.axes.same(dims[-i], out[-i])
                else:
                    out[-i] = dims[-i]
    pairs = zip(out, shape, strict=True)
    return [tuple(d if call.axes.size(call.axes.known(d)) == n else call.axes.new(n) for d, n in pairs)]


def _along(*names: str) -> Callable[[OperatorCall], Results]:
    """The shape stays, and the dims that these arguments name have to be whole."""

    def rule(call: OperatorCall) -> Results:
        (dims, *_) = [call.dims(n) for n in call.tensors]
        for name in names:
            argument = call.args.get(name)
            several = (
                argument
                if isinstance(argument, (list, tuple))
                else range(len(dims))
                if argument is None
                else [argument]
            )
            call.whole([dims[at_of(d, dims)] for d in several])
        return [dims] * len(call.shapes)

    return rule


def _prelu(call: OperatorCall) -> Results:
    dims, (weight,) = call.dims(call.args["self"]), call.dims(call.args["weight"])
    if call.axes.known(weight):
        call.axes.same(dims[1], weight)
    return [dims]


def _glu(call: OperatorCall) -> Results:
    dims = list(call.dims(call.args["self"]))
    at = at_of(call.args["dim"], dims)
    pieces, dims[at] = call.axes.folded(dims[at], call.shapes[0][at])
    call.whole([pieces])
    return [tuple(dims)]


# Products --------------------------------------------------------------------------------------------------


def _contracted(call: OperatorCall, left: Dim, right: Dim) -> None:
    call.axes.same(left, right)
    call.summed += left


def _linear(call: OperatorCall) -> Results:
    x, (out, inner) = call.dims(call.args["input"]), call.dims(call.args["weight"])
    _contracted(call, x[-1], inner)
    if call.args.get("bias") is not None:
        call.axes.same(call.dims(call.args["bias"])[0], out)
    return [(*x[:-1], out)]


def _matmul(call: OperatorCall) -> Results:
    names = [
        n for n in ("mat1", "mat2", "batch1", "batch2", "vec", "vec1", "vec2", "other") if n in call.args
    ]
    added = call.args.get("self") if len(names) == 2 else None
    a, b = (call.dims(call.args[k]) for k in (names if added is not None else ("self", *names)))
    if len(b) == 1:
        _contracted(call, a[-1], b[0])
        out = a[:-1]
    elif len(a) == 1:
        _contracted(call, a[0], b[-2])
        out = (*b[:-2], b[-1])
    else:
        _contracted(call, a[-1], b[-2])
        batch: list[Dim] = [()] * max(len(a) - 2, len(b) - 2)
        for dims in (a[:-2], b[:-2]):
            for i in range(1, len(dims) + 1):
                if call.axes.known(dims[-i]):
                    if batch[-i]:
                        call.axes.same(batch[-i], dims[-i])
                    batch[-i] = dims[-i]
        out = (*batch, a[-2], b[-1])
    if added is not None:
        for dim, axes in zip(reversed(out), reversed(call.dims(added)), strict=False):
            if call.axes.known(axes):
                call.axes.same(dim, axes)
    return [out]


def _einsum(call: OperatorCall) -> Results:
    inputs, arrow, output = call.args["equation"].replace(" ", "").partition("->")
    if not arrow or "." in inputs:
        raise Misfit
    letters: dict[str, Dim] = {}
    for word, operand in zip(inputs.split(","), call.args["tensors"], strict=True):
        for letter, dim in zip(word, call.dims(operand), strict=True):
            if letter in letters and call.axes.known(dim) and call.axes.known(letters[letter]):
                call.axes.same(letters[letter], dim)
            if not call.axes.known(letters.get(letter, ())):
                letters[letter] = dim
    for letter, dim in letters.items():
        if letter not in output:
            call.summed += dim
    return [tuple(letters[letter] for letter in output)]


def _convolution(call: OperatorCall) -> Results:
    """Channels are dealt; of several groups only where each channel is one."""
    x, weight = call.dims(call.args["input"]), call.dims(call.args["weight"])
    bias, groups = call.args.get("bias"), call.args.get("groups", 1)
    turned = "transpose" in call.name
    out, inner = (weight[1], weight[0]) if turned else (weight[0], weight[1])
    if len(x) != len(weight):
        raise Misfit  # without a batch
    if groups == 1:
        _contracted(call, x[1], inner)
    elif not turned and groups == call.axes.size(x[1]) == call.axes.size(out):
        call.axes.same(x[1], out)
    else:
        raise Misfit
    if bias is not None:
        call.axes.same(call.dims(bias)[0], out)
    call.whole([*x[2:], *weight[2:]])
    return [(x[0], out, *call.axes.fresh(call.shapes[0][2:]))]


def _attention(call: OperatorCall) -> Results:
    q, k, v = (call.dims(call.args[name]) for name in ("query", "key", "value"))
    if not len(q) == len(k) == len(v) or call.args.get("enable_gqa"):
        raise Misfit
    for i in range(len(q) - 2):
        call.axes.same(q[i], k[i])
        call.axes.same(q[i], v[i])
    mask = call.args.get("attn_mask")
    if mask is not None:
        dims = call.dims(mask)
        call.whole(dims[-2:])
        for axes, dim in zip(reversed(dims[:-2]), reversed(q[:-2]), strict=False):
            if call.axes.known(axes):
                call.axes.same(axes, dim)
    call.whole([*q[-2:], *k[-2:], *v[-2:]])
    return [(*q[:-1], v[-1])]


def _embedding(call: OperatorCall) -> Results:
    rows, width = call.dims(call.args["weight"])
    call.summed += rows
    return [(*call.dims(call.args["indices"]), width)]


# Norms and sums --------------------------------------------------------------------------------------------


def _last_norm(call: OperatorCall) -> Results:
    x = call.dims(call.args["input"])
    count = len(call.args["normalized_shape"])
    for name in ("weight", "bias"):
        argument = call.args.get(name)
        for dim, mine in zip(x[-count:], call.dims(argument) if argument is not None else (), strict=False):
            call.axes.same(dim, mine)
    call.whole(x[-count:])
    return [x]


def _batch_norm(call: OperatorCall) -> Results:
    x = call.dims(call.args["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.args.get(name) is not None:
            call.axes.same(x[1], call.dims(call.args[name])[0])
    call.whole([x[0], *x[2:]])
    return [x]


def _group_norm(call: OperatorCall) -> Results:
    x, groups = call.dims(call.args["input"]), call.args["num_groups"]
    (which, inside) = call.axes.folded(x[1], call.axes.size(call.axes.known(x[1])) // groups)
    for name in ("weight", "bias"):
        if call.args.get(name) is not None:
            call.axes.same(call.dims(call.args[name])[0], (*which, *inside))
    call.whole([inside, *x[2:]])
    return [x]


def _sum(call: OperatorCall) -> Results:
    (x,) = (call.dims(n) for n in call.tensors)
    argument = call.args.get("dim")
    over = {at_of(d, x) for d in ([argument] if isinstance(argument, int) else argument or range(len(x)))}
    for d in over:
        call.summed += x[d]
    keep = call.args.get("keepdim", False)
    return [tuple(() if d in over else dim for d, dim in enumerate(x) if keep or d not in over)]


def _reduced(call: OperatorCall) -> Results:
    """As a sum, of something else: whole."""
    (out,) = _sum(call)
    call.whole([call.summed])
    call.summed.clear()
    return [out] * len(call.shapes)


_TABLE: Sequence[tuple[str, Callable[[OperatorCall], Results]]] = (
    ("to contiguous clone detach alias dropout type_as _to_copy lift_fresh_copy feature_dropout", _alike),
    ("softplus hardtanh hardswish relu6 mish selu celu gelu silu leaky_relu elu logsigmoid softsign", _alike),
    ("expand_as zeros_like ones_like full_like empty_like", _alike),
    ("prelu", _prelu),
    ("glu", _glu),
    ("softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp", _along("dim")),
    ("flip roll", _along("dims")),
    ("linear", _linear),
    ("matmul mm bmm addmm baddbmm dot mv", _matmul),
    ("einsum", _einsum),
    ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", _convolution),
    ("scaled_dot_product_attention", _attention),
    ("embedding", _embedding),
    ("layer_norm rms_norm", _last_norm),
    ("batch_norm", _batch_norm),
    ("group_norm", _group_norm),
    ("sum mean", _sum),
    ("amax amin logsumexp var std prod argmax argmin all any max min norm linalg_vector_norm", _reduced),
    ("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as", shapes.view),
    ("transpose permute t numpy_T mT movedim swapaxes swapdims", shapes.permuted),
    ("expand", shapes.expand),
    ("repeat", shapes.repeat),
    ("repeat_interleave", shapes.repeat_interleave),
    ("select", shapes.select),
    ("slice narrow split split_with_sizes chunk unbind tensor_split", shapes.pieces),
    ("cat stack concat", shapes.joined),
    ("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d", shapes.window),
    ("adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d", shapes.window),
    ("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_linear1d", shapes.window),
    ("pad constant_pad_nd", shapes.padded),
    ("index", shapes.indexed),
    ("arange full zeros ones empty scalar_tensor linspace eye", shapes.filled),
    ("new_zeros new_ones new_full new_empty", shapes.filled),
    ("tril triu", shapes.triangle),
)
RULES: Mapping[str, Callable[[OperatorCall], Results]] = {
    name: rule for names, rule in _TABLE for name in names.split()
}
