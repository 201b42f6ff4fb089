"""What happens around a prepared model's forward, and what is looked at until the first updates have been made.

Around every forward: which batch it computes on, and whose random numbers. In the first steps also: losses that are no
mean over samples, buffers that part, random numbers. Later the looking is switched off.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.library.batch_tracer import BatchTracer, LossWatcher
from unisono.library.batches import digest, digest_of, leaves_of
from unisono.library.current_batch import CurrentBatch
from unisono.library.exchange import ScalarExchange
from unisono.library.notices import Notices
from unisono.library.randomness import Streams
from unisono.library.user_hooks import watch, watch_functions, watch_modules
from unisono.spec.errors import UsageError
from unisono.spec.finder import is_ours

Node = Any  # of autograd's graph
STEPS = 2  # of each model; an odd batch or a second kind of loss often comes with the second
PATIENCE = 16  # steps of any model after which a model that has made none is waited for no longer


class FirstSteps:
    """Looks at losses and models until each model has made STEPS steps."""

    def __init__(
        self,
        current_batch: CurrentBatch,
        streams: Streams,
        exchange: ScalarExchange,
        notify: Notices,
        following: BatchTracer,
    ) -> None:
        self._batch, self._streams = current_batch, streams
        self._exchange, self._notify = exchange, notify
        self._steps_made: list[int] = []
        self._outputs: dict[Node, None] = {}
        self._following = following
        self._losses = LossWatcher(self._loss, following)
        self._paths: list[str] = []  # of this step's losses
        self._terms: list[float] = []  # numbers a sample in each of their means
        self._uncounted = False  # whether one is of other things than this rank's samples
        self._judged = False  # whether gradients that no backward made have come before
        following.watch = lambda hooks: watch(hooks, following, notify)

    @property
    def looking(self) -> bool:
        return (
            self._exchange.group.size > 1
            and sum(self._steps_made) < PATIENCE
            and min(self._steps_made, default=0) < STEPS
        )

    def one_more(self) -> int:
        """Count one more prepared model and return its number."""
        self._steps_made.append(0)
        self._following.look(self.looking)
        self.look(True)
        return len(self._steps_made) - 1

    def shards(self, model: nn.Module) -> None:
        """Note that this model's parameters are sharded."""
        before = self._losses.sharded
        self._losses.sharded = lambda x: before(x) or any(x is p for p in model.parameters())

    def look(self, on: bool) -> None:
        self._losses.switch(on and self.looking)
        self._streams.looking = self.looking

    def entered(self, model: nn.Module) -> None:
        """A forward begins; what it computes is followed, and losses are not looked for."""
        self.look(False)
        if self.looking:
            watch_modules(model, self._following, self._notify)
            self._following.switch(True)

    def forwarded(self, outputs: Any) -> None:
        """A model has made these outputs, of which a loss may be made."""
        self.look(True)
        if self.looking:
            results = [
                x for x in leaves_of(outputs) if isinstance(x, Tensor) and x.dim() and x.grad_fn is not None
            ]
            self._outputs |= dict.fromkeys(x.grad_fn for x in results)
            for x in results:
                self._following.take_for_samples(x)

    def judge(self, gradients: Sequence[Tensor]) -> None:
        """Notice gradients that no backward made and that are no means. Every rank calls it."""
        traces = [trace for grad in gradients if (trace := self._following.of(grad)) is not None]
        met = next((trace.met for trace in traces if trace.met), "")
        if met or not (traces or self._judged):
            self._notify("J26", met)
            self._notify.settle()
        self._judged = True

    def before_step(self, number: int, model: nn.Module) -> None:
        """Compare the ranks before a step of model `number`. Raises UsageError if the job is strict and something
        was noticed."""
        if not self.looking:
            return
        self._compare(list(model.buffers()))
        self._outputs.clear()
        self._notify.settle()
        self._steps_made[number] += 1
        self._following.look(self.looking)
        self.look(True)

    def _compare(self, buffers: Sequence[Tensor]) -> None:
        """Compare what the ranks have seen in this step."""
        paths = digest(" ".join(self._paths).encode())
        terms = 0 if self._uncounted else digest(repr(self._terms).encode())  # 0: nothing to compare
        moved = digest_of([b.reshape(-1) for b in buffers]) if buffers else 0
        acted = self._following.acted_on()
        rows = self._exchange.rows([moved, paths, terms, bool(acted)])
        differ = [any(value != column[0] for value in column) for column in zip(*rows, strict=True)]
        if differ[0]:
            self._notify("J14")
        if differ[1] and any(row[3] for row in rows):
            self._notify("J30", acted)
        if len({row[2] for row in rows if row[2]}) > 1 and not differ[1]:
            self._notify(
                "J10", f"a mean over {self._terms} numbers a sample here, and other numbers elsewhere"
            )
        self._paths, self._terms, self._uncounted = [], [], False

    def _loss(self, loss: Tensor) -> None:
        batch = self._batch.latest
        if not batch.count or loss.grad_fn is None:
            return
        trace = self._following.of(loss)
        if trace is not None and (trace.met or trace.undivided):
            self._notify("J10", trace.met or trace.undivided)
        path, functions = way_of(loss.grad_fn)
        for node, name in way_of(loss.grad_fn, self._outputs)[1].items():
            shapes = [output.shape for output in node._input_metadata]  # of what the function has returned
            if any(not shape or shape[0] != batch.samples for shape in shapes):
                self._notify("J31", name)
        watch_functions(functions, self._following, self._notify)
        self._paths.append(path)
        self._terms += trace.terms if trace is not None else ()
        # A mean over one sample is none to torch: there is nothing to compare.
        self._uncounted |= batch.weighed or batch.borrowed or batch.samples < 2


def way_of(root: Node, until: Collection[Node] = (), most: int = 4096) -> tuple[str, dict[Node, str]]:
    """Return the operations of a graph, in one order, and the script's own autograd functions, by node. until: nodes
    behind which the graph is not read."""
    todo, seen, kinds, functions = [root], {root}, [], {}
    while todo and len(kinds) < most:
        node = todo.pop()
        if node in until:
            continue
        kinds.append(node.name())
        if isinstance(node, torch.autograd.function.BackwardCFunction) and (name := _own_function(node)):
            functions[node] = name
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                todo.append(behind)
    return " ".join(kinds), functions


def _own_function(node: Node) -> str:
    """The name of an autograd function of the script's own; "" of another."""
    function = getattr(node, "_forward_cls", None)
    if function is None or function.__module__.startswith("torch.") or is_ours(function.__module__):
        return ""
    return function.__name__


def follow(
    model: nn.Module, current_batch: CurrentBatch, streams: Streams, steps: FirstSteps, before: Sequence[Any]
) -> None:
    """Hooks around the model's forward. before: more to do as it begins. They are functions, so that a copy of the
    model has them without copying what they act on."""
    running: list[Any] = []

    def enters(model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # activations that a backward computes again
            running.append(None)
            return
        for act in before:
            act()
        steps.entered(model)
        current_batch.forward((args, kwargs), torch.is_grad_enabled())
        running.append(streams.forward())
        running[-1].__enter__()

    def leaves(_: nn.Module, __: Any, outputs: Any) -> None:
        context = running.pop()
        if context is not None:
            context.__exit__(None, None, None)
            steps.forwarded(outputs)

    model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True)
    model.register_forward_hook(leaves, always_call=True)


def refuse_double_backward(model: nn.Module) -> None:
    """FSDP2 frees what a gradient of a gradient would need: said in our words, as its first backward begins."""

    def marked(_: nn.Module, __: Any, outputs: Any) -> None:
        for x in leaves_of(outputs):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(_single)

    model.register_forward_hook(marked)


def _single(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            "a gradient of a gradient (create_graph=True) goes through a model that is sharded",
            where="backward",
            fix="the same ranks as dp, or a penalty without a second derivative",
            code="J18",
        )
