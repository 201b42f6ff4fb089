"""In the first steps: sees every loss before its backward, every gradient that is asked for, and every operation.

Every operation of torch passes here, in forwards too. The tensors of a batch have traces, and what is computed from
them has the traces that `tracing_rules` give it. So statistics of a batch that carry no gradient are seen where they
enter the loss, and samples that meet inside the model.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.library.modes import place_dispatch_mode, place_function_mode
from unisono.library.traces import SampleTrace, TorchCall
from unisono.library.tracing_rules import traced
from unisono.spec.errors import UsageError

_OF_GROUPS = frozenset({"c10d", "_c10d_functional", "fsdp"})  # what ranks tell each other is no rank's own


class Traces:
    """By tensor. A tensor's Python object may go and come again while autograd holds its numbers, so it is known by
    what stays: torch's own object, whose place in memory is not used again while there is a weak reference to it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, SampleTrace]] = {}

    def __getitem__(self, x: Tensor) -> SampleTrace | None:
        entry = self._known.get(x._cdata)
        return None if entry is None or entry[0].expired() else entry[1]

    def __setitem__(self, x: Tensor, trace: SampleTrace | None) -> None:
        if trace is None:
            self._known.pop(x._cdata, None)
        else:
            self._known[x._cdata] = torch._C._WeakTensorRef(x), trace  # type: ignore[attr-defined]

    def clean(self) -> None:
        """Forget tensors that are gone."""
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}


class BatchTracer(TorchDispatchMode):
    """Off until `switch(True)`. notify(code, detail): hears what makes a difference by itself. old: parameters that
    sharding has replaced.

    read: the number that the script read last from a batch's statistics, and so may act on; "" for none."""

    def __init__(self, ranks: int, notify: Callable[[str, str], object]) -> None:
        super().__init__()
        self._notify, self._ranks = notify, ranks
        self._traces = Traces()
        self._batches, self._samples, self._weighed = 0, 0, False
        self.old: list[Container[Tensor]] = []
        # Shown the hooks of tensors that are no parameters.
        self.watch: Callable[[Any], object] = lambda hooks: None
        self.on, self.read = False, ""
        self._looks, self._operations, self._read_at = False, 0, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def switch(self, on: bool) -> None:
        if on or self.on:
            self.on = place_dispatch_mode(self, on)

    def looking(self) -> bool:
        """Whether the first steps are not over."""
        return self._looks

    @contextmanager
    def alone(self) -> Iterator["BatchTracer"]:
        """Trace inside, with new traces alone; restore the old ones afterwards."""
        was, kept, self._traces = self.on, self._traces, Traces()
        self.switch(True)
        try:
            yield self
        finally:
            self.switch(was)
            self._traces = kept

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not trace what is computed inside."""
        was = self.on
        self.switch(False)
        try:
            yield
        finally:
            self.switch(was)

    def begin(self, tensors: Sequence[Tensor], samples: int) -> None:
        """A batch is at hand, of so many samples on this rank."""
        self._batches += 1
        self._samples, self._weighed, self.read = samples, False, ""
        if not self._looks:
            return
        self._traces.clean()
        for x in tensors:
            if x.dim() and x.shape[0] == samples:
                self._traces[x] = SampleTrace(self._batches, samples)

    def end(self) -> None:
        """A backward is over: numbers that are drawn now are not for samples."""
        self._samples = 0

    def weigh(self) -> None:
        """Note that the script has weighed the loss of the current batch."""
        self._weighed = True

    def look(self, on: bool) -> None:
        """Whether the first steps, in which this looks, are not over."""
        self._looks = on
        if not on:
            self._traces = Traces()

    def acted_on(self) -> str:
        """Return the statistic of a batch that the script read, if it computed anything of the batch afterwards."""
        return self.read if self._operations > self._read_at else ""

    def of(self, x: object) -> SampleTrace | None:
        """Return the trace of a tensor; None if it does not depend on a batch, or nothing is known."""
        return self._traces[x] if isinstance(x, Tensor) else None

    def mark(self, x: Tensor, trace: SampleTrace | None) -> None:
        """Say what is known of a tensor that was made out of sight."""
        self._traces[x] = None if isinstance(x, nn.Parameter) else trace

    def take_for_samples(self, output: Tensor) -> None:
        """Assume that an output of a model without a trace has a row for each sample."""
        if self._per_sample(output) and self.of(output) is None:
            self.mark(output, SampleTrace(self._batches, self._samples))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, (Tensor, torch.Generator))]
        if inputs:
            self._follow(func, args, kwargs or {}, out, inputs)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Any]) -> None:
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if len(tensors) < len(inputs) and any(self._per_sample(x) for x in outs):
            self._notify("J16", f"{func.overloadpacket.__name__}(generator=...)")
        if any(x in old for old in self.old for x in tensors):
            self._notify("J15", f"{func.overloadpacket.__name__} reads one")
        for x in tensors:
            if not x.is_leaf and x._backward_hooks:
                self.watch(x._backward_hooks)
        if func.namespace in _OF_GROUPS:
            for x in (*tensors, *outs):
                self._traces[x] = None
            return
        if all(self._traces[x] is None for x in tensors):
            return
        name, inplace = func.overloadpacket.__name__, func._schema.is_mutable
        if name == "_local_scalar_dense":
            trace = self.of(args[0])
            if trace is not None and trace.reduced:
                self.read, self._read_at = trace.met or trace.reduced, self._operations
            return
        self._operations += 1
        arguments = _bound(func, args, kwargs)
        plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        call = TorchCall(plain, arguments, self.of, outs, self._weighed, self._ranks)
        results: Sequence[SampleTrace | None] = [None] * len(outs)
        # With arguments that its rule does not expect, an operation leaves no trace.
        with suppress(KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError):
            results = traced(call, torch.Tag.pointwise in func.tags)
        for x, trace in zip(outs, results, strict=True):
            wrong = trace is not None and trace.dim is not None and not _fits(x, trace.dim, trace.extent)
            self.mark(x, None if wrong or (inplace and not name.endswith("_")) else trace)

    def _per_sample(self, x: Tensor) -> bool:
        return self._samples > 1 and x.dim() > 0 and x.shape[0] == self._samples


def _fits(x: Tensor, dim: int, extent: int) -> bool:
    return dim < x.dim() and x.shape[dim] == extent


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name."""
    schema = func._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return arguments | {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs


_WRAPPED: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]


class LossWatcher(TorchFunctionMode):
    """While it is on, shows every loss to `seen` before its backward. following: on and off with it, and off in the
    backward."""

    def __init__(self, seen: Callable[[Tensor], None], following: BatchTracer | None = None) -> None:
        super().__init__()
        self._seen, self._following, self.on = seen, following, False
        self.sharded: Callable[[Tensor], bool] = lambda x: False  # whether it is a parameter that is dealt

    def switch(self, on: bool) -> None:
        """Switch it on or off."""
        if self._following is not None:
            self._following.switch(on)
        if on or self.on:
            self.on = place_function_mode(self, on)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            losses = [args[0]] if isinstance(args[0], Tensor) else args[0]
            with nullcontext() if self._following is None else self._following.paused():
                with torch._C.DisableTorchFunction():
                    for loss in losses:
                        self._seen(loss)
                result = func(*args, **kwargs)
            if self._following is not None:
                self._following.end()
            return result
        try:
            if func is torch.autograd.grad and self._following is not None:
                return self._by_autograd_grad(self._following, args, kwargs)
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, AttributeError, ValueError, AssertionError) as error:
            if any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
                raise _of_shards(func, error) from error
            raise

    def _by_autograd_grad(self, following: BatchTracer, args: Any, kwargs: Any) -> Any:
        """torch.autograd.grad: a gradient of what is not of the batch is a sum over its samples."""
        arguments = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | kwargs
        outputs, inputs = (tree_leaves(arguments[name]) for name in ("outputs", "inputs"))
        if any(_WRAPPED(x) for x in (*outputs, *inputs)):
            return torch.autograd.grad(*args, **kwargs)  # inside torch.func its operations say more
        if any(self.sharded(x) for x in inputs):
            raise UsageError(
                "torch.autograd.grad is asked for gradients by parameters that are sharded, which do not meet then",
                where="plan.shard",
                fix="loss.backward(); or dp in the place of shard",
                code="J29",
            )
        of = following.of
        losses = [trace for x in outputs if (trace := of(x)) is not None]
        with following.paused():
            gradients = torch.autograd.grad(*args, **kwargs)
        for x, gradient in zip(inputs, gradients, strict=False):
            if isinstance(gradient, Tensor) and losses:
                following.mark(gradient, self._of_gradient(of(x), losses[0]))
        return gradients

    def _of_gradient(self, by: SampleTrace | None, loss: SampleTrace) -> SampleTrace:
        """Return the trace of a gradient. by: the trace of what it is a gradient by."""
        if by is not None and by.dim is not None:
            return by
        return SampleTrace(loss.batch, loss.samples, dim=None, reduced="gradient", met=loss.met)


def _of_shards(func: Any, error: Exception) -> UsageError:
    name = getattr(func, "__name__", "an operation").removeprefix("_foreach_").strip("_")
    said = str(error).strip().split("\n")[0]
    return UsageError(
        f"torch's {name} cannot take parameters that are sharded: {said[:160]}",
        where="plan.shard",
        likely="weights that are read outside the model's forward, or an optimiser that treats a tensor as a whole",
        fix="dp in the place of shard; or compute it in the model's forward, where parameters are whole",
        code="J29",
    )
