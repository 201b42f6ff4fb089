"""`unisono prove` and `check_gradients` inside their processes: play a loop, a script or a function of the user's, and
leave what it came to in files."""

import importlib
import os
import random
import runpy
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.launch.context import RankContext
from unisono.library.batch_tracer import LossWatcher
from unisono.library.enter import ScriptStage, init, staged
from unisono.library.gradient_check import PLAYS, SCRIPT, plain_name
from unisono.library.job import Job
from unisono.library.suppose import supposed
from unisono.library.wire_count import SummedNumbers
from unisono.plan import Plan
from unisono.spec.errors import UserCodeError
from unisono.spec.finder import executed
from unisono.spec.frames import is_foreign

NOISE = 4.0  # of a gradient, in units of its dtype's last place: what another order of a sum may do to it


class Enough(BaseException):
    """The loop has made its steps; no handler of the user's takes it for an error."""


class Coarsest(TorchDispatchMode):
    """While it is on, keeps the coarsest floating dtype that anything is computed in: Muon's step has bfloat16 inside,
    and so has a forward under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.name = 0.0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point() and torch.finfo(x.dtype).eps > self.eps:
                self.eps, self.name = torch.finfo(x.dtype).eps, str(x.dtype).removeprefix("torch.")
        return result


class StepLog:
    """What each step of an optimiser came to, in one file for each rank and step:

    grad/NAME      the gradient that the optimiser is about to step, all shards of it together
    own/NAME       what this rank's own samples made of it, weighed, before ranks met, where no shards are in the way
    loss/N         the N-th loss since the last step, as its part of the mean over the global batch
    param/NAME     parameters and buffers after the step
    optim/KEY/NAME the optimiser's state after the step

    NAME begins with the number of the model. noisy: change each gradient by as much as another order of its sums does.
    """

    def __init__(self, folder: Path, rank: int, steps: int, noisy: bool = False) -> None:
        self._folder, self._rank, self._left, self._noisy = folder, rank, steps, noisy
        self._draws = torch.Generator().manual_seed(1)
        self._models: list[nn.Module] = []
        self._known: set[int] = set()
        self._rank_gradients: dict[int, Tensor] = {}
        self._losses: list[float] = []
        self._tensors: dict[str, Tensor] = {}
        self._thread = threading.get_ident()
        self._backwards = LossWatcher(self._loss)
        self.jobs: list[Job] = []
        self.steps_made = 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Record steps, also of optimisers that the script never gave to `prepare`."""
        hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._other(optimizer, self._before)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._other(optimizer, self._after)),
        )
        try:
            yield
        finally:
            self._backwards.switch(False)
            for hook in hooks:
                hook.remove()

    def see(self, job: Job) -> None:
        """Record what this job prepares from now on."""
        self.jobs.append(job)
        job.prepare = partial(self._prepare, job.prepare)  # type: ignore[method-assign]

    def end(self) -> None:
        """Record the weights at the loop's own end: something else than an optimiser may have changed them."""
        for model in self._models:
            self._tensors |= self._values(model)
        self._save("end")

    def _prepare(
        self,
        prepare: Any,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *rest: Any,
        **more: Any,
    ) -> Any:
        known = any(model is known for known in self._models)
        prepared = prepare(model, optimizer, *rest, **more)
        if not known:
            self._models.append(model)
            for p in model.parameters():
                if p.requires_grad and not isinstance(p, DTensor):
                    # Behind that of `prepare`, which weighs it.
                    p.register_hook(partial(self._arrived, id(p)))
            model.register_forward_pre_hook(lambda *_: self._look(False))
            model.register_forward_hook(lambda *_: self._look(True), always_call=True)
        for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
            self._known.add(id(each))
            each.register_step_pre_hook(lambda prepare, *_: self._before(prepare))
            each.register_step_post_hook(lambda prepare, *_: self._after(prepare))
        return prepared

    def _look(self, on: bool) -> None:
        if torch._C._current_graph_task_id() == -1:  # a backward may compute activations again
            self._backwards.switch(on)

    def _loss(self, loss: Tensor) -> None:
        if loss.numel() == 1 and self.jobs:
            job = self.jobs[-1]
            ratio = job._batch.latest.ratio / job.mesh.data.size
            self._losses.append(loss.item() * ratio if ratio else 0.0)

    def _arrived(self, key: int, grad: Tensor) -> None:
        self._rank_gradients[key] = (
            grad.detach().clone()
            if key not in self._rank_gradients
            else self._rank_gradients[key] + grad.detach()
        )

    def _other(self, optimizer: Optimizer, act: Callable[[Optimizer], None]) -> None:
        if self._thread == threading.get_ident() and id(optimizer) not in self._known and self._models:
            act(optimizer)

    def _named(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        names = {
            id(p): f"{number}.{name}"
            for number, model in enumerate(self._models)
            for name, p in model.named_parameters()
        }
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        return [(names.get(id(p), f"other.{i}"), p) for i, p in enumerate(stepped)]

    def _before(self, optimizer: Optimizer) -> None:
        if self._left == 0:
            raise Enough
        self._tensors = {}
        for name, p in self._named(optimizer):
            if p.grad is not None:
                self._tensors[f"grad/{name}"] = whole(p.grad).detach().clone()  # a step may fill it anew
                if id(p) in self._rank_gradients:
                    self._tensors[f"own/{name}"] = self._rank_gradients.pop(id(p))
        if self._noisy:
            self._perturb(optimizer)

    def _perturb(self, optimizer: Optimizer) -> None:
        grads = [p.grad for _, p in self._named(optimizer) if p.grad is not None and p.grad.numel()]
        grads = [g for g in grads if g.is_floating_point() and not g.is_sparse]
        largest = max((float(g.abs().max()) for g in grads), default=0.0)
        for g in grads:
            drawn = 2 * torch.rand(g.shape, generator=self._draws, dtype=torch.float64) - 1
            g.add_((NOISE * torch.finfo(g.dtype).eps * largest * drawn).to(g))

    def _after(self, optimizer: Optimizer) -> None:
        for name, p in self._named(optimizer):
            self._tensors[f"param/{name}"] = whole(p)
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    self._tensors[f"optim/{key}/{name}"] = whole(value)
        for number, model in enumerate(self._models):
            self._tensors |= {f"param/{number}.{name}": whole(x) for name, x in model.named_buffers()}
        for number, value in enumerate(self._losses):
            self._tensors[f"loss/{number}"] = torch.tensor(value, dtype=torch.float64)
        self._losses = []
        self._save(f"{self.steps_made:04d}")
        self.steps_made += 1
        self._left -= 1
        if self._left == 0:
            raise Enough

    def _values(self, model: nn.Module) -> dict[str, Tensor]:
        number = next(i for i, known in enumerate(self._models) if known is model)
        named = [*model.named_parameters(), *model.named_buffers()]
        return {f"param/{number}.{name}": whole(x) for name, x in named}

    def _save(self, name: str) -> None:
        # A copy each: safetensors refuses tensors that share memory.
        kept = {
            key: x.detach().cpu().contiguous().clone()
            for key, x in self._tensors.items()
            if not x.is_sparse and not x.is_complex()
        }
        save_file(kept, self._folder / f"{self._rank}-{name}")
        self._tensors = {}


def whole(x: Tensor) -> Tensor:
    """Return a tensor with all its shards."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def prepare(argument: dict[str, Any]) -> Callable[..., Any] | None:
    """In the fork server: the function, found again where it was defined; None for a script, which each rank runs."""
    if "script" in argument:
        return None
    function: Any = _module(argument["module"], argument["file"])
    for part in argument["name"].split("."):
        function = getattr(function, part)
    return function


def _module(name: str, file: str) -> ModuleType:
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ImportError:
            name = Path(file).stem
    name = SCRIPT if name == "__main__" else name
    return sys.modules[name] if name in sys.modules else executed(file, name, "check_gradients")


def _seed(number: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


def main(ctx: RankContext, argument: dict[str, Any], function: Callable[..., Any] | None) -> dict[str, Any]:
    """Every rank calls function(job), or runs the script; or calls the function for its gradients."""
    _seed(argument["seed"])
    if argument["dtype"]:
        torch.set_default_dtype(getattr(torch, argument["dtype"]))
    if function is not None and "alone" in argument:
        return _gradients(ctx, argument, function)
    if ctx.world == 1 and not dist.is_initialized():  # other libraries look for it, wherever RANK is set
        dist.init_process_group(ctx.backend, store=ctx.store, rank=0, world_size=1)
    log = StepLog(Path(argument["folder"]), ctx.rank, argument["steps"], argument["noisy"])
    dtypes = Coarsest() if argument["noisy"] else nullcontext()
    with staged(ScriptStage(Plan.parse(argument["plan"]), ctx, log.see)), log.looking(), dtypes:
        try:
            if function is None:
                run_script(argument["script"], argument["words"], argument["cwd"], argument["folder"])
            else:
                function(init())
            log.end()
        except Enough:
            pass
    files = _own_files(argument["script"]) if "script" in argument else []
    notes = [note for job in log.jobs for note in job.notes]
    coarsest = dtypes.name if isinstance(dtypes, Coarsest) else ""
    return {"notes": notes, "jobs": len(log.jobs), "files": files, "coarsest": coarsest}


def _gradients(ctx: RankContext, argument: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """One process alone calls function(), each of several function(ctx)."""
    alone = argument["alone"]
    if not alone:
        dist.init_process_group(ctx.backend, store=ctx.store, rank=ctx.rank, world_size=ctx.world)
    if "suppose" in argument:
        return _supposed(argument, function)
    with SummedNumbers() if argument.get("counts") else nullcontext() as summed:
        returned = function() if alone else function(ctx)
    parts: list[Any] = list(returned) if isinstance(returned, Sequence) and alone else [returned]
    order: dict[str, None] = {}
    for i, part in enumerate(parts):
        folder = Path(argument["folder"]) / (f"part-{i:04d}" if alone else f"rank-{ctx.rank:04d}")
        tensors = _whole_gradients(part, argument["name"])
        order |= dict.fromkeys(tensors)
        save_file(tensors, folder)
    sharded = [plain_name(str(name)) for name, x in parts[0].items() if isinstance(x, DTensor)]
    numbers = 0 if summed is None else summed.numbers
    return {"parts": len(parts), "order": list(order), "cut": [] if alone else sharded, "summed": numbers}


def _supposed(argument: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """What one device makes with one mistake, for each mistake that is supposed; all shares of it together."""
    texts: list[str] = []
    for text, parts in supposed(function, argument["suppose"], partial(_seed, argument["seed"])):
        total = {
            key: sum(part[key].detach() for part in parts if key in part) for part in parts for key in part
        }
        save_file(
            _whole_gradients(total, argument["name"]), Path(argument["folder"]) / f"supposed-{len(texts):04d}"
        )
        texts.append(text)
    return {"texts": texts}


def _whole_gradients(part: Any, name: str) -> dict[str, Tensor]:
    """Every rank calls it: gathering a DTensor is a collective, in the order of the names. Raises UserCodeError R01."""
    if not isinstance(part, Mapping) or not part or not all(isinstance(x, Tensor) for x in part.values()):
        kind = type(part).__name__
        raise UserCodeError(f"{name} returned {kind}, not a mapping from names to gradients", code="R01")
    return {plain_name(str(key)): whole(x.detach()).contiguous().clone().cpu() for key, x in part.items()}


def run_script(script: str, words: Sequence[str], cwd: str, folder: str) -> None:
    """As `python SCRIPT WORDS...` does, in a mirror of `cwd` inside of `folder`. Raises UserCodeError R01 where the
    script leaves with another exit code than 0."""
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    with mirror(Path(cwd), folder):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise UserCodeError(f"the script left with {leaving.code!r}", where=script) from leaving


def _own_files(script: str) -> list[str]:
    """Return the script and the files that it has imported from its folder and those below."""
    folder = Path(script).parent
    modules: Mapping[str, Any] = dict(sys.modules)
    files = (getattr(module, "__file__", None) for module in modules.values())
    files_imported = {Path(file) for file in files if file and file.endswith(".py") and not is_foreign(file)}
    return sorted({script, *(str(path) for path in files_imported if path.is_relative_to(folder))})


MOST = 5000  # entries that are mirrored one by one; a folder beyond is a link
SMALL = 1 << 18  # bytes of a file that is copied; a larger one is a link
ROOM = 64 << 20  # bytes of all copies


@contextmanager
def mirror(folder: Path, inside: str) -> Iterator[Path]:
    """The current folder while this lasts: as `folder`, with copies of small files and links to others. What is new,
    removed or renamed leaves `folder` as it was, also in folders that are there; and so does what is written in place,
    unless it is large. inside: of which folder; whoever made that removes what a killed rank leaves."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix=PLAYS, dir=inside) as name:
        _link(folder, Path(name))
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def _link(folder: Path, into: Path) -> None:
    """Breadth first, so that it is the deep folders that are left whole."""
    waiting, count, room = [(folder, into)], 0, ROOM
    while waiting:
        source, target = waiting.pop(0)
        target.mkdir(exist_ok=True)
        for entry in os.scandir(source):
            if entry.name.startswith(PLAYS):  # such a folder, in a folder for temporary ones
                continue
            count += 1
            plain = count <= MOST and not entry.is_symlink() and os.access(entry.path, os.R_OK)
            if plain and entry.is_dir() and not entry.name.startswith("."):
                waiting.append((Path(entry.path), target / entry.name))
            elif plain and entry.is_file() and entry.stat().st_size <= min(SMALL, room):
                room -= entry.stat().st_size
                shutil.copy2(entry.path, target / entry.name)
            else:
                os.symlink(os.path.abspath(entry.path), target / entry.name)
