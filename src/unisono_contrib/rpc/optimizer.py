"""An optimiser whose parameters are of several workers; each worker updates its own."""

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono_contrib.rpc import autograd
from unisono_contrib.rpc.current import here
from unisono_contrib.rpc.errors import no_member, refused
from unisono_contrib.rpc.exports import exported, path_of
from unisono_contrib.rpc.futures import wait_all
from unisono_contrib.rpc.objects import RRef


@exported
class LocalOptimizer:
    """The part of a DistributedOptimizer that updates one worker's parameters, for one caller at a time."""

    def __init__(
        self, path: str, params: Sequence[RRef[Tensor]], args: Sequence[Any], options: dict[str, Any]
    ) -> None:
        self._params = [rref.local_value() for rref in params]
        self._optimizer = _class_of(path)(self._params, *args, **options)
        self._lock = threading.Lock()

    def step(self, context: int) -> None:
        """Update with the gradients of a context; parameters that it does not reach stay."""
        gradients = autograd.get_gradients(context)
        with self._lock:
            for p in self._params:
                p.grad = gradients.get(p)
            self._optimizer.step()
            for p in self._params:
                p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


class DistributedOptimizer:
    """Updates parameters where they are, after a distributed backward.

        optimizer = DistributedOptimizer(torch.optim.SGD, [rref, ...], lr=0.1)
        with autograd.context() as context:
            autograd.backward(context, [loss])
            optimizer.step(context)

    kind: a class of torch.optim, or one that the owners export. params: RRefs to parameters. Further arguments, JSON
    values, are the optimiser's. Raises what making it raises on an owner.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], params: Sequence[RRef[Tensor]], *args: Any, **options: Any
    ):
        worker, owners = here(), dict[str, list[RRef[Tensor]]]()
        for rref in params:
            owners.setdefault(rref.owner_name(), []).append(rref)
        if not owners:
            raise no_member("an optimiser without parameters", "RRefs to parameters")
        self.parts = [
            worker.remote(owner, LocalOptimizer, (path_of(kind), rrefs, list(args), options))
            for owner, rrefs in owners.items()
        ]
        wait_all([part.handle.created for part in self.parts if part.handle.created is not None])

    def step(self, context: int) -> None:
        """Update all parameters with the gradients of a context; returns when all are. Raises PeerLost, RemoteError."""
        wait_all([part.rpc_async().step(context) for part in self.parts])


def _class_of(path: str) -> type[torch.optim.Optimizer]:
    """An optimiser of torch, or one that this worker exports. Raises UsageError Q04."""
    module, _, name = path.partition(":")
    if module == "torch.optim" or module.startswith("torch.optim."):
        kind = getattr(sys.modules.get(module), name, None)
    else:
        kind: Any = here().exports.find(path)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise refused(
            f"{path} is no optimiser", "a class of torch.optim, or one with @rpc.exported", where=path
        )
    return kind
