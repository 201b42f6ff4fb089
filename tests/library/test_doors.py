"""Doors to FSDP2: what it saves is read under any plan, and what is saved here it reads, both to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unisono
from tests.models import fsdp_net
from tests.ranks import World
from tests.train.small import started
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.spec.errors import UsageError
from unisono.train import export
from unisono.train.build.continued import go_on
from unisono.train.data.load import load as load_data
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import pieces_of

pytestmark = pytest.mark.timeout(120)
VOCAB, CONTEXT, STEPS = 23, 6, 3


def fsdp2(seed: int, groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a tie, buffers and rows that no number of ranks divides, as FSDP2 shards it."""
    torch.manual_seed(seed)
    model = fsdp_net.Net(VOCAB, CONTEXT)
    fully_shard(model.mlp)
    fully_shard(model)
    return model, adamw(model, groups)


def adamw(model: nn.Module, groups: bool) -> torch.optim.AdamW:
    """groups: those of nanoGPT: matrices decay, and the rest does not."""
    if not groups:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    parts = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(parts, lr=0.01)


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(97 * step + rank))


def trained(rank: int, groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = fsdp2(0, groups)
    for step in range(STEPS):
        model(batch(step, rank)).logsumexp(-1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for buffer in model.buffers():  # each rank has its own; a checkpoint has those of any
        dist.broadcast(buffer, 0)
    return model, optimizer


def whole(state: Any) -> dict[str, Tensor]:
    """All tensors of a state, whole, by the path to each."""
    if isinstance(state, Tensor):
        return {"": state.full_tensor() if isinstance(state, DTensor) else state.clone()}
    inner = state.items() if isinstance(state, dict) else ()
    return {f"/{key}{path}": x for key, value in inner for path, x in whole(value).items()}


def saved_by_fsdp2(ctx: Any, folder: str, flat: bool, groups: bool) -> None:
    """Trains, and saves a folder of DCP; beside it, whole tensors to compare with."""
    model, optimizer = trained(ctx.rank, groups)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, optim = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=folder)
    plain = get_state_dict(model, optimizer)
    expected = whole({"model": plain[0], "optim": plain[1]})
    if ctx.rank == 0:
        torch.save(expected, f"{folder}.pt")


def read_by_fsdp2(ctx: Any, folder: str, flat: bool, groups: bool, expected: str) -> list[str]:
    """Loads a folder as its page says; the names of what differs."""
    model, optimizer = fsdp2(1, groups)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, optim = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": optim}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == ([0.1, 0.0] if groups else [0.05])
    plain = get_state_dict(model, optimizer)
    return differing(whole({"model": plain[0], "optim": plain[1]}), expected)


def differing(state: dict[str, Tensor], expected: str) -> list[str]:
    wanted = torch.load(expected)
    wrong = {n for n in wanted.keys() & state.keys() if not torch.equal(wanted[n], state[n])}
    return sorted(wrong | (wanted.keys() ^ state.keys()))


def through_a_loop(ctx: Any, plan: str, source: str, folder: str, groups: bool) -> int:
    """A loop of ours goes on from a folder of DCP, and saves its own."""
    torch.manual_seed(2)
    model = fsdp_net.Net(VOCAB, CONTEXT)
    optimizer = adamw(model, groups)
    job = unisono.init(plan)
    model, optimizer = job.prepare(model, optimizer)
    assert job.load(source) == {}
    job.save(folder)
    return job.step


@pytest.fixture(scope="module")
def theirs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    world(saved_by_fsdp2, 4, folder=str(folder / "plain"), flat=False, groups=False)
    world(saved_by_fsdp2, 4, folder=str(folder / "groups"), flat=True, groups=True)
    return folder


@pytest.mark.parametrize(
    ("plan", "ranks", "groups", "back"),
    [("shard=3", 3, False, 4), ("dp=2 shard=2", 4, True, 3), ("dp=1", 1, False, 2)],
)
def test_a_loop_goes_on_from_fsdp2_and_back(
    world: World, theirs: Path, tmp_path: Path, plan: str, ranks: int, groups: bool, back: int
) -> None:
    source = theirs / ("groups" if groups else "plain")
    steps = world(
        through_a_loop, ranks, plan=plan, source=str(source), folder=str(tmp_path / "ours"), groups=groups
    )
    assert steps == [STEPS] * ranks
    made = export.run(tmp_path / "ours", to="dcp", out=tmp_path / "dcp")
    assert ".metadata" in made["files"] and made["step"] == STEPS
    for flat in (False, True):
        differ = world(
            read_by_fsdp2,
            back,
            folder=str(tmp_path / "dcp"),
            flat=flat,
            groups=groups,
            expected=f"{source}.pt",
        )
        assert differ == [[]] * back


RECIPE = Recipe(
    model=ModelConfig(kind=f"{fsdp_net.__file__}:net", context=CONTEXT),
    data=DataConfig(source="text:TEXT", tokenizer="char"),
    train=TrainConfig(steps=9, global_batch=8, micro_batch=2, lr=0.01, weight_decay=0.1),
)


def through_a_run(ctx: Any, plan: str, recipe: str, folder: str) -> list[int]:
    """A run of `unisono train` goes on from a folder of DCP, and saves its own."""
    read = Recipe.model_validate_json(recipe)
    run, _, _ = started(ctx, read, plan)
    go_on(run, read, load_data(read.data, read.model))
    state = {
        "step": run.step,
        "recipe": read.model_dump(mode="json"),
        "cut_names": {name: list(names) for name, names in run.local.cut_names.items()},
    }
    save(Path(folder), run.step, pieces_of(run), state, rank=ctx.rank, world=ctx.world, token="one")
    return [run.step]


@pytest.mark.parametrize(
    ("plan", "ranks", "back"), [("tp=2 pp=2", 4, 3), ("shard=2 dp=2", 4, 4), ("dp=1", 1, 2)]
)
def test_a_run_goes_on_from_fsdp2_and_back(
    world: World, theirs: Path, tmp_path: Path, plan: str, ranks: int, back: int
) -> None:
    (tmp_path / "text.txt").write_text("abcdefghijklmnopqrstuvw" * 40)
    fields = RECIPE.model_dump(mode="json")
    fields["data"]["source"] = f"text:{tmp_path / 'text.txt'}"
    fields["train"]["continue_from"] = str(theirs / "groups")
    recipe = json.dumps(fields)
    steps = world(through_a_run, ranks, plan=plan, recipe=recipe, folder=str(tmp_path / "run"))
    assert steps == [[STEPS]] * ranks
    export.run(tmp_path / "run", to="dcp", out=tmp_path / "dcp")
    differ = world(
        read_by_fsdp2,
        back,
        folder=str(tmp_path / "dcp"),
        flat=False,
        groups=True,
        expected=f"{theirs / 'groups'}.pt",
    )
    assert differ == [[]] * back


def in_memory(ctx: Any, plan: str, expected: str) -> list[str]:
    """From FSDP2's DTensors into a job, and out of it into another FSDP2's."""
    from torch.distributed.device_mesh import init_device_mesh

    model, optimizer = trained(ctx.rank)
    weights, optim = get_state_dict(model, optimizer)
    torch.manual_seed(2)
    mine = fsdp_net.Net(VOCAB, CONTEXT)
    stepped = adamw(mine, False)
    job = unisono.init(plan)
    job.prepare(mine, stepped)
    unisono.from_dtensor_state_dict(job, {"model": weights, "optim": optim})
    assert job.step == STEPS
    state = unisono.to_dtensor_state_dict(job)
    wrong = differing(whole({k: state[k] for k in ("model", "optim")}), expected)
    mesh = init_device_mesh("cpu", (ctx.world,))
    other, idle = fsdp2(3)
    placed = unisono.to_dtensor_state_dict(job, mesh)
    set_state_dict(other, idle, model_state_dict=placed["model"], optim_state_dict=placed["optim"])
    again = get_state_dict(other, idle)
    return wrong + differing(whole({"model": again[0], "optim": again[1]}), expected)


@pytest.mark.parametrize("plan", ["dp=2 shard=2", "dp=4"])
def test_state_dicts_of_dtensors_both_ways(world: World, theirs: Path, plan: str) -> None:
    assert world(in_memory, 4, plan=plan, expected=f"{theirs / 'plain'}.pt") == [[]] * 4


def refused(ctx: Any, folder: str, groups: bool) -> str:
    model = fsdp_net.Net(VOCAB, CONTEXT)
    job = unisono.init("dp=1")
    job.prepare(model, adamw(model, groups))
    with pytest.raises(UsageError) as error:
        job.load(folder)
    return f"{error.value.code} {error.value.what}"


def test_what_does_not_fit_is_refused(world: World, theirs: Path, tmp_path: Path) -> None:
    [text] = world(refused, 1, folder=str(theirs / "groups"), groups=False)
    assert text.startswith("K08 ") and "weight_decay" in text
    dcp.save({"model": fsdp_net.Net(VOCAB, CONTEXT).state_dict()}, checkpoint_id=tmp_path / "w", no_dist=True)
    [text] = world(refused, 1, folder=str(tmp_path / "w"), groups=False)
    assert text.startswith("K07 ") and "no optimiser state" in text
