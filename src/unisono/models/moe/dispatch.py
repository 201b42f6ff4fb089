"""Tokens put in the order of their experts, computed on, and put back.

Shapes: N tokens, W choices of a token, M of the N · W choices that are kept, D width, F hidden width, E experts.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.moe import MoEConfig
from unisono.models.moe.routing import TokenChoice, casting


class GroupedLinear(torch.autograd.Function):
    """x [M, I] in the order of experts, weight [E, O, I], sizes: rows of each expert → [M, O]."""

    @staticmethod
    def forward(ctx, x_MI, weight_EOI, sizes):  # type: ignore[override]
        ctx.save_for_backward(x_MI, weight_EOI)
        ctx.sizes = sizes
        y_MO = x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])
        for y, x, weight in zip(y_MO.split(sizes), x_MI.split(sizes), weight_EOI, strict=True):
            torch.mm(x, weight.T, out=y)
        return y_MO

    @staticmethod
    def backward(ctx, grad_MO):  # type: ignore[override]
        x_MI, weight_EOI = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x_MI), torch.empty_like(weight_EOI)
        grads, rows = grad_MO.split(ctx.sizes), x_MI.split(ctx.sizes)
        for e, (grad, x, gx) in enumerate(zip(grads, rows, grad_x.split(ctx.sizes), strict=True)):
            torch.mm(grad, weight_EOI[e], out=gx)
            torch.mm(grad.T, x, out=grad_weight[e])  # zero for an expert without a token
        return grad_x, grad_weight, None


class Spread(torch.autograd.Function):
    """x [N, D] → [M, D]: the token of each kept choice. slots [M]: where the choice stands among all N · W."""

    @staticmethod
    def forward(ctx, x_ND, slots_M, width):  # type: ignore[override]
        ctx.save_for_backward(slots_M)
        ctx.size, ctx.width = x_ND.shape[0], width
        return x_ND[slots_M // width]

    @staticmethod
    def backward(ctx, grad_MD):  # type: ignore[override]
        return _collected(grad_MD, ctx.saved_tensors[0], ctx.size, ctx.width), None, None


class Collect(torch.autograd.Function):
    """y [M, D] → [N, D]: the sum over each token's choices."""

    @staticmethod
    def forward(ctx, y_MD, slots_M, size, width):  # type: ignore[override]
        ctx.save_for_backward(slots_M)
        ctx.width = width
        return _collected(y_MD, slots_M, size, width)

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[override]
        return grad_ND[ctx.saved_tensors[0] // ctx.width], None, None, None


def _collected(y_MD: Tensor, slots_M: Tensor, size: int, width: int) -> Tensor:
    """One order of sums on every device, which an `index_add` of a GPU does not have."""
    room = y_MD.new_zeros(size * width, y_MD.shape[1])
    return room.index_copy_(0, slots_M, y_MD).view(size, width, -1).sum(1)


class ExpertStack(nn.Module):
    """A stack of feed-forward layers, as `gpt.net.FeedForward`. Rows x [M, D] in the order of experts → [M, D].

    A rank may hold some of the experts, and of each some of its hidden width. Biases lie flat, one expert's after the
    other, so that they count as vectors. bias_from: where this rank's part of the hidden width begins in them; all of
    it is there. adds_bias: whether the last bias is added here, as it is on one of those who share an expert.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        E, D, width = config.n_experts, config.d_model, config.expert_width
        gated = config.activation == "swiglu"
        self.full_width, self.top_k, self.gated = width, config.top_k, gated
        self.up = nn.Parameter(torch.empty(E, width, D))
        self.gate = nn.Parameter(torch.empty(E, width, D)) if gated else None
        self.down = nn.Parameter(torch.empty(E, D, width))
        self.up_bias = nn.Parameter(torch.empty(E * width)) if config.bias else None
        self.gate_bias = nn.Parameter(torch.empty(E * width)) if config.bias and gated else None
        self.down_bias = nn.Parameter(torch.empty(E * D)) if config.bias else None
        self.bias_from, self.adds_bias = 0, True

    @property
    def met(self) -> int:
        """Matrix elements that a token meets."""
        return self.top_k * (3 if self.gated else 2) * self.full_width * self.up.shape[2]

    @property
    def additions(self) -> int:
        """Of one token, forward and backward: two products of one expert, and the sum over its experts."""
        return 2 * (self.up.shape[2] + self.full_width) + 2 * self.top_k

    def forward(self, x_MD: Tensor, sizes: Sequence[int]) -> Tensor:
        kind = casting(x_MD)
        if torch.is_autocast_enabled(kind):
            x_MD = x_MD.to(torch.get_autocast_dtype(kind))
        hidden_MF = self._linear(x_MD, self.up, self.up_bias, sizes)
        if self.gate is None:
            hidden_MF = F.gelu(hidden_MF)
        else:
            hidden_MF = F.silu(self._linear(x_MD, self.gate, self.gate_bias, sizes)) * hidden_MF
        y_MD = GroupedLinear.apply(hidden_MF, self.down.to(hidden_MF.dtype), sizes)
        if self.down_bias is None:
            return y_MD  # type: ignore[return-value]
        bias_ED = self.down_bias.view(len(sizes), -1) * float(self.adds_bias)
        return y_MD + _each(bias_ED.to(y_MD.dtype), sizes)

    def _linear(self, x_MD: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
        y_MF: Tensor = GroupedLinear.apply(x_MD, weight.to(x_MD.dtype), sizes)  # type: ignore[assignment]
        if bias is None:
            return y_MF
        bias_EF = bias.view(len(sizes), -1)[:, self.bias_from : self.bias_from + y_MF.shape[1]]
        return y_MF + _each(bias_EF.to(y_MF.dtype), sizes)


def _each(bias_EF: Tensor, sizes: Sequence[int]) -> Tensor:
    """[E, F] → [M, F]: of each row its expert's."""
    return torch.cat([bias.expand(size, -1) for bias, size in zip(bias_EF.unbind(), sizes, strict=True)])


class Dispatch(nn.Module):
    """x [B, t, D] and a TokenChoice → [B, t, D]. Nothing is learned here, so a pass over the model may put another way
    of reaching the experts in this one's place."""

    def forward(self, x_BtD: Tensor, choice: TokenChoice, experts: ExpertStack) -> Tensor:
        expert_NW, kept_NW = choice.expert.flatten(0, 1), choice.kept.flatten(0, 1)
        size, width = expert_NW.shape
        slots_M = kept_NW.flatten()
        # without numbers all are kept, and experts are alike in load
        slots_M = torch.empty_like(expert_NW.flatten()) if slots_M.is_meta else slots_M.nonzero().flatten()
        expert_M, order_M = expert_NW.flatten()[slots_M].sort(stable=True)
        slots_M = slots_M[order_M]
        x_MD: Tensor = Spread.apply(x_BtD.flatten(0, 1), slots_M, width)  # type: ignore[assignment]
        y_MD = self.compute(x_MD, expert_M, experts)
        weight_M = choice.weight.flatten()[slots_M].to(y_MD.dtype)
        return Collect.apply(y_MD * weight_M[:, None], slots_M, size, width).view(x_BtD.shape)  # type: ignore[union-attr]

    def compute(self, x_MD: Tensor, expert_M: Tensor, experts: ExpertStack) -> Tensor:
        """Rows in the order of their experts expert_M, all of which are here → what they make of them."""
        return experts(x_MD, sizes_of(expert_M, len(experts.up)))


def sizes_of(expert_M: Tensor, experts: int) -> list[int]:
    """How many choices each expert has; as even as may be on the meta device."""
    rows = len(expert_M)
    if expert_M.is_meta:
        return [rows // experts + (e < rows % experts) for e in range(experts)]
    return torch.bincount(expert_M, minlength=experts).tolist()
