"""Lazy updates of tables: a row without a gradient keeps its weights, its moments, and does not decay.

So a step costs what its samples have read, however large the table is. As users of recommenders expect, a row's moments
stand still between its uses (torch's SparseAdam does the same), and counters count the steps of the whole table. A row
whose gradient is zero in all entries is one without, so that it does not matter how a gradient is written down.

Rows are stepped as one line with zeros behind, whose length fills vector registers: see `train.step.update`. Where an
optimiser has `adds_rows`, others change the same rows meanwhile: then what a step changes is added to them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def touched(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows [k], their gradients [k, width], where these stand in the gradient's own values [k])."""
    values = grad.values() if grad.is_sparse else grad
    at = (values != 0).any(1).nonzero()[:, 0]
    return grad.indices()[0][at] if grad.is_sparse else at, values[at], at


def step_rows(optimizer: Optimizer, stand_ins: Mapping[nn.Parameter, nn.Parameter], lanes: int) -> None:
    """Let the optimiser, which knows the stand-ins, step the rows of the masters that have gradients. stand_ins: by
    master. lanes: elements that fill the widest register."""
    under_way: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
    begun: dict[int, Tensor] = {}  # lines as they were read, by the tensor whose rows they have

    def line(rows: Tensor) -> Tensor:
        out = rows.new_zeros(max(1, -(-rows.numel() // lanes)) * lanes)
        out[: rows.numel()] = rows.flatten()
        return out

    def read(whole: Tensor, rows: Tensor, adds: bool) -> Tensor:
        out = line(whole[rows])
        if adds:
            begun[id(whole)] = out.clone()
        return out

    @torch.no_grad()
    def before(optimizer: Optimizer, *_: object) -> None:
        adds = getattr(optimizer, "adds_rows", False)
        for master, stand_in in stand_ins.items():
            stand_in.grad = None
            if master.grad is None:
                continue
            rows, values, at = touched(master.grad)
            under_way[master] = rows, at
            stand_in.data, stand_in.grad = read(master, rows, adds), None
            stand_in.grad = line(values)
            state = optimizer.state[master]
            optimizer.state[stand_in] = {k: read(v, rows, adds) if v.dim() else v for k, v in state.items()}

    @torch.no_grad()
    def after(optimizer: Optimizer, *_: object) -> None:
        scaled = getattr(optimizer, "grad_scale", None) is not None
        for master, (rows, at) in under_way.items():
            stand_in, shape = stand_ins[master], (len(rows), *master.shape[1:])

            def put(
                whole: Tensor, line_of: Tensor, rows: Tensor = rows, shape: tuple[int, ...] = shape
            ) -> None:
                was = begun.pop(id(whole), None)
                if was is None:
                    whole.index_copy_(0, rows, line_of[: shape[0] * shape[1]].view(shape))
                else:
                    whole.index_add_(0, rows, (line_of - was)[: shape[0] * shape[1]].view(shape))

            put(master, stand_in)
            for key, value in optimizer.state[stand_in].items():
                if value.dim():
                    put(optimizer.state[master][key], value)
            if scaled and stand_in.grad is not None and master.grad is not None:  # as the kernel left it
                grad = master.grad
                put(grad.values() if grad.is_sparse else grad, stand_in.grad, at)
            stand_in.data, stand_in.grad = stand_in.new_zeros(lanes), None
            del optimizer.state[stand_in]
        under_way.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
