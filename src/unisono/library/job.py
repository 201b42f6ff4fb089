"""`Job`: what a script holds while its own loop runs on several ranks."""

import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final, overload

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unisono.comm.mesh import Mesh
from unisono.launch.rank.calls import Ledger
from unisono.library import checks, leave, sharding
from unisono.library.batch_sharding import ShardedLoader
from unisono.library.batch_tracer import BatchTracer
from unisono.library.current_batch import CurrentBatch
from unisono.library.doors import go_on
from unisono.library.exchange import ScalarExchange, of_each, spread
from unisono.library.explain import explained
from unisono.library.first_steps import FirstSteps, follow, refuse_double_backward
from unisono.library.gather import gather, join_batches
from unisono.library.gradients import LoopGradients
from unisono.library.join import JoinedLoader, JoinedLoaders
from unisono.library.modes import unwatched
from unisono.library.notices import Notices
from unisono.library.randomness import Draws, Streams
from unisono.library.ranks import Ranks, rows_of
from unisono.library.sharding import Moved, shard
from unisono.library.state import JobPlace, Prepared, as_written, persistent_buffers
from unisono.observe.metrics import JsonLines
from unisono.parallel.params import local_of, slots_of
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.train.foreign.trained import is_trained, open_state
from unisono.train.step.grad_norm import ByTensor, clip

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
class Job:
    """One rank's view of a run whose loop is the user's. `unisono.init` returns it. Every rank calls its methods.

    rank, world: this process among all. device: where this rank computes. step: optimiser steps made. generator: random
    numbers for the current samples, the same on any number of ranks. ranks: small collectives and messages. advice:
    whether `unisono prove` has proven the script, and the command that does. strict: raise errors instead of notes.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        wire: torch.device,
        owner: bool,
        strict: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.plan, self.mesh, self.device = plan, mesh, device
        self.rank, self.world = mesh.rank, mesh.shape.world
        self.step = 0
        self._exchange = ScalarExchange(mesh.data, wire)
        # Norms have groups of their own: a call that one rank alone makes meets no gradients, waits, and is named.
        self._norms = mesh.group("shard", ("shard",))
        self._norm_is_met = ScalarExchange(mesh.group("dp", ("dp",)), wire)
        self._ledger = ledger or Ledger()
        self._notices = Notices(self._exchange, strict)
        self._following = BatchTracer(mesh.data.size, self._notices)
        self._batch = CurrentBatch(mesh.data.index, mesh.data.size, self._notices, self._following.begin)
        self._prepared: list[Prepared] = []
        self._dealt: list[ShardedLoader] = []
        self._lines: dict[Path, JsonLines] = {}
        self.advice: tuple[str, ...] = ()
        self._owner = owner
        self._closed = False
        self._seed = self._common(torch.initial_seed())
        self._place = JobPlace(self, self._common(secrets.randbits(63)))
        self.ranks = Ranks(self._exchange)
        self._streams = Streams(self._seed, mesh.data.index, mesh.data.size, self._notices)
        self._joins = JoinedLoaders(self._batch, self._exchange, self._streams)
        self._steps = FirstSteps(self._batch, self._streams, self._exchange, self._notices, self._following)
        self.generator = Draws(self._seed, self._batch, lambda: self.step)

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What makes this run differ from that of one device, as far as it was noticed, each with a code and a remedy;
        and parameters that the last backward did not reach."""
        return *self._notices.said.values(), *(
            f"{name} had no gradient in the last backward on any rank"
            for prepared in self._prepared
            for name in prepared.gradients.unused
        )

    @explained()
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *data: Any,
        blocks: Sequence[nn.Module] | None = None,
    ) -> Any:
        """Spread a model, its optimisers and its data over the ranks. Returns them in the order of the arguments.

        Model and optimisers stay the same objects, so that schedulers and other references stay valid. Initial
        parameters and buffers become those of rank 0. Each loader, or any iterable of global batches, is replaced by
        one that yields this rank's samples. Under `shard` all ranks call the model, or none does, in evaluation too.

        blocks: the modules that `shard` gathers one at a time (FSDP units); by default the elements of the model's
        lists and sequences.

        A job may prepare several models, and a model again with another optimiser. Raises UsageError.
        """
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        checks.fit(model, optimizers)
        self._streams.to_script()
        prepared = next((known for known in self._prepared if known.model is model), None)
        if prepared is None:
            prepared = self._spread(model, optimizers, blocks)
        else:
            checks.new_only(optimizers, prepared.optimizers)
            for other in optimizers:
                sharding.repoint(other, prepared.moved)
            checks.own_only(model, optimizers)
            prepared.optimizers.extend(optimizers)
        self._follow(prepared, optimizers)
        dealt = [each if each is None else self._deal(each) for each in data]
        return (model, optimizer, *dealt)

    def _spread(
        self, model: nn.Module, optimizers: list[Optimizer], blocks: Sequence[nn.Module] | None
    ) -> Prepared:
        """A model that is new to this job."""
        checks.own_only(model, optimizers)
        several, sharded, number = self.mesh.data.size > 1, self.plan.shard > 1, self._steps.one_more()
        if several:
            spread([*model.parameters(), *model.buffers()], self.mesh.data)
            join_batches(model, self.mesh.data, self._batch)
        shapes = {name: tuple(p.shape) for name, p in as_written(model).named_parameters()}
        moved: Moved = {}
        if sharded:
            mesh, zero = self.mesh.shard, self.plan.zero
            moved = shard(model, optimizers, blocks, mesh, zero)
            self._following.old.append(moved)
            self._steps.shards(model)
            sharding.copied_with_shards(model, lambda copy, parts: shard(copy, (), parts, mesh, zero))
            refuse_double_backward(model)
        slots = slots_of(as_written(model), shapes, {}, self.mesh, False, frozenset())
        dp = self.mesh.group("dp", ("dp",)) if number else self.mesh.dp

        def meet() -> None:
            if several:
                self._ledger.note(f"backward of model {number}", self.mesh.data.ranks, *self._batch.says())

        exchange, over = ScalarExchange(dp, self._exchange.device), self._streams.to_script
        gradients = LoopGradients(slots, dp, self.mesh.shard, self._batch, over, meet, exchange)
        if several:
            gradients.scatter_through(model)

        def begins() -> None:
            sharding.refuse_others(model)
            if gradients.look_anew():
                sharding.follow_flags(model)

        follow(model, self._batch, self._streams, self._steps, [begins] if sharded else [])
        names = {name: id(p) for name, p in as_written(model).named_parameters(remove_duplicate=False)}
        prepared = Prepared(number, model, optimizers, tuple(slots), gradients, moved, names)
        self._prepared.append(prepared)
        return prepared

    def _follow(self, prepared: Prepared, optimizers: Sequence[Optimizer]) -> None:
        """Act before and after each step of these optimisers."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda stepping, *_: self._before_step(prepared, stepping))
            optimizer.register_step_post_hook(lambda stepping, *_: self._after_step(prepared, stepping))

    @explained()
    def deal(self, data: Any) -> ShardedLoader:
        """Return a loader of this rank's samples for one more source of global batches, such as validation data."""
        self._streams.to_script()
        return self._deal(data)

    def join(self, data: Iterable[Any]) -> JoinedLoader:
        """Return a loader for batches of this rank's own, of which another rank may have more. The global batch of a
        step is the union of the ranks' batches, and every rank makes as many steps as the longest."""
        return self._joins.of(data)

    def _deal(self, data: Any) -> ShardedLoader:
        number = len(self._dealt)
        self._dealt.append(
            ShardedLoader(data, self._batch, self._exchange, self._streams, number, self._seed)
        )
        return self._dealt[-1]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients on this rank: a backward inside sends nothing, the next one outside sends the sum. It
        saves messages and changes no number."""
        was = [prepared.gradients.hold(True) for prepared in self._prepared]
        try:
            yield
        finally:
            for prepared, holding in zip(self._prepared, was, strict=False):
                prepared.gradients.hold(holding)

    @explained()
    def weigh(self, count: float) -> None:
        """Declare that the loss of the current batch is a mean over `count` things on this rank, such as tokens without
        padding, and not over its samples. Call it between fetching the batch and its forward."""
        count = 0 if self._batch.expected().borrowed else count
        total = self._exchange.sums([count])[0]
        if total <= 0:
            raise UsageError(f"the batch counts {total:g} over all ranks", where="job.weigh", code="J07")
        self._batch.weigh(count, total)
        self._following.weigh()

    @overload
    def mean(self, value: float) -> float: ...
    @overload
    def mean(self, value: Tensor) -> Any: ...
    @unwatched()
    def mean(self, value: float | Tensor) -> Any:
        """Return the mean over the global batch of a mean over this rank's samples, such as the loss: a number, or a
        tensor for a tensor with dims, such as a buffer."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return self._means([value])[0]
        part = value.detach().to(torch.float64) * (self._batch.ratio / self.mesh.data.size)
        return self.mesh.data.all_reduce(part).to(value.dtype)

    @explained()
    def gather(self, *rows: "Tensor | list[Any]") -> Any:
        """Gather rows of the current batch: x [samples here, ...] becomes [samples of the global batch, ...] on every
        rank, in order, each sample once. A list with one plain value per sample becomes the list of all.

        Gradients flow back, so a loss across samples (InfoNCE, statistics of a batch) of the gathered rows equals that
        of one device."""
        whole = [self._gathered(x) for x in rows]
        return tuple(whole) if len(whole) > 1 else whole[0]

    def _gathered(self, x: "Tensor | list[Any]") -> Any:
        batch, group = self._batch.current, self.mesh.data
        if isinstance(x, Tensor) or group.size == 1:
            return gather(x, batch, group) if isinstance(x, Tensor) else x
        return rows_of(of_each(x, self._exchange), batch.parts(group.size))

    def _means(self, values: Sequence[float | Tensor]) -> list[float]:
        ratio, size = self._batch.ratio, self.mesh.data.size
        plain = [v.item() if isinstance(v, Tensor) else v for v in values]
        parts = [v * ratio / size if ratio else 0.0 for v in plain]
        return self._exchange.sums(parts)

    @explained()
    def clip(self, max_norm: float, model: nn.Module | None = None) -> float:
        """Scale gradients so that their 2-norm over the whole model is at most `max_norm`. Return the norm before
        (Pascanu et al., 2013). model: one of several prepared models; the first by default."""
        prepared = self._find(model)
        prepared.gradients.catch_up()
        for slot in prepared.slots:
            slot.take_gradient()
        shapes = {slot.name: slot.shape for slot in prepared.slots}
        nothing = torch.zeros(0, dtype=torch.float64, device=prepared.slots[0].master.device)
        norm = ByTensor(shapes, self._norms, self.mesh.at)(prepared.slots, nothing)[0]
        self._norm_is_met.sums([norm])
        clip(prepared.slots, norm, max_norm)
        return norm

    @explained()
    def clip_value(self, largest: float, model: nn.Module | None = None) -> None:
        """Clamp every entry of the gradients into [-largest, largest]."""
        prepared = self._find(model)
        prepared.gradients.catch_up()
        for slot in prepared.slots:
            if slot.live.grad is not None:
                local_of(slot.live.grad).clamp_(-largest, largest)

    def autocast(self, dtype: str | torch.dtype = "bf16", **options: Any) -> torch.autocast:
        """Return `torch.autocast` for this rank's device; dtype is "bf16", "fp16" or a torch.dtype."""
        kind = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(dtype)
        if kind is None:
            raise UsageError(
                f"{dtype} is no dtype of products", where="job.autocast", fix="bf16 or fp16", code="J25"
            )
        return torch.autocast(self.device.type, dtype=kind, **options)

    def scaler(self, **options: Any) -> GradScaler:
        """Return a `torch.amp.GradScaler` for this rank's device, which fp16 needs. It skips the same steps on all
        ranks."""
        return GradScaler(self.device.type, **options)

    def log(self, folder: str | Path | None = None, /, **values: float | Tensor) -> dict[str, float]:
        """Return means over the global batch, the same on every rank. Rank 0 prints them on stderr.

        With a folder as the first argument, rank 0 also appends them, with `step`, to `metrics.jsonl` in it.
        """
        means = dict(zip(values, self._means(list(values.values())), strict=True))
        if self.is_main:
            print(f"step {self.step}", *(f"{k} {v:.6g}" for k, v in means.items()), sep="  ", file=sys.stderr)
            if folder is not None:
                path = Path(folder) / "metrics.jsonl"
                if path not in self._lines:
                    self._lines[path] = JsonLines(path)
                self._lines[path].write({"step": self.step, **means})
        return means

    @explained()
    def keep(self, **things: Any) -> None:
        """Add objects with `state_dict` and `load_state_dict` to checkpoints: `job.keep(schedule=schedule)`."""
        self._place.keep(things)

    @explained()
    def save(self, folder: str | Path, state: Mapping[str, Any] | None = None, keep: int | None = 3) -> Path:
        """Save models, buffers, optimisers, random states, the place in the data and what `keep` was given; returns
        the checkpoint, `folder/checkpoints/step-N`.

        state: JSON values of yours, such as an epoch or a scheduler's `state_dict()`. keep: how many checkpoints
        to leave. The files load under any plan, and hold no pickle. Raises UsageError K02 if it cannot be written.
        """
        return self._place.save(Path(folder), state or {}, keep)

    @explained()
    def load(self, folder: str | Path) -> dict[str, Any] | None:
        """Resume from the newest checkpoint in `folder`, or from `folder` if it is one. Return the `state` of `save`,
        or None if there is no checkpoint yet. The next pass through each loader yields what was left of the pass.

        A folder of `torch.distributed.checkpoint` gives weights, optimiser and step. Raises UsageError: K01 if it is
        damaged, K03 if it is of another model, K07 and K08 for such a folder that does not fit.
        """
        path = Path(folder)
        return go_on(self, open_state(path)) if is_trained(path) else self._place.load(path)

    def knows(self, thing: nn.Module | Optimizer) -> bool:
        """Whether a model or an optimiser is prepared."""
        return any(thing is known for p in self._prepared for known in (p.model, *p.optimizers))

    @explained()
    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return whole parameters and buffers on the CPU, under the names of the `state_dict` of one device."""
        prepared = self._find(model)
        whole: dict[int, Tensor] = {}
        for slot in prepared.slots:
            live = slot.live.detach()
            whole[id(slot.live)] = (live.full_tensor() if isinstance(live, DTensor) else live).cpu().clone()
        names = {name: whole[key] for name, key in prepared.names.items()}
        return names | {n: buffer.detach().cpu().clone() for n, buffer in persistent_buffers(prepared.plain)}

    def close(self) -> None:
        """Leave together with the other ranks. Called automatically when the script ends."""
        if not self._closed and self._owner:
            leave.part(self.mesh.world)
        self._closed = True

    def close_at_exit(self) -> None:
        """Leave at the end of the interpreter; `init` registers it."""
        if not self._closed:
            self._closed = True
            leave.part_at_exit(self.mesh.world)

    def _common(self, number: int) -> int:
        line = torch.tensor([number & ((1 << 63) - 1)], dtype=torch.int64)
        return int(self._exchange.from_first(line).item())

    def _find(self, model: nn.Module | None) -> Prepared:
        for prepared in self._prepared:
            if model is None or prepared.model is model:
                return prepared
        what = "no model is prepared yet" if model is None else "this model is not prepared"
        raise UsageError(what, fix="job.prepare(model, optimizer, data) first", code="J08")

    @explained()
    def _before_step(self, prepared: Prepared, optimizer: Optimizer) -> None:
        prepared.gradients.catch_up()
        if self.mesh.data.size > 1:
            checks.all_known(optimizer, prepared.gradients.slots)
            fresh = prepared.gradients.meet_others(self._steps.looking)
            if fresh is not None:
                self._steps.judge(fresh)
        if self._steps.looking:
            if self.plan.shard > 1:
                checks.all_stepped(prepared.optimizers, prepared.gradients.slots)
                held = sharding.held_elsewhere(prepared.moved)
                if held:
                    self._notices("J15", held)
            self._steps.before_step(prepared.number, prepared.model)
        self._following.switch(False)

    def _after_step(self, prepared: Prepared, optimizer: Optimizer) -> None:
        self._steps.look(True)
        self.step += prepared.number == 0 and optimizer is prepared.optimizers[0]
