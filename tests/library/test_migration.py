"""docs/migration.md: every row is played, ours on two ranks, theirs where the library is here; whole loops agree."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import World

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
FENCE = re.compile(r"^```python (?P<mark>[a-z ]+)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(?P<theirs>.*?)` \| (?P<ours>.*?) \|$", re.MULTILINE)
SECTIONS = ("PyTorch DDP", "Accelerate", "Lightning", "Horovod", "DeepSpeed")
LOOPS = {"ddp": "torch", "accelerate": "accelerate", "lightning": "lightning"}
SHOWN = ("FSDPStrategy", "algorithms.Join")  # needs a GPU; a context that is entered around a loop


def fences() -> dict[str, str]:
    return {match["mark"]: match["body"] for match in FENCE.finditer(PAGE.read_text())}


def rows(section: str) -> list[tuple[str, str]]:
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [(match["theirs"], match["ours"]) for match in ROW.finditer(text)]


def group_from(ctx: Any) -> None:
    """`init_process_group` finds the ranks of this test, whatever a script says."""
    import torch.distributed as dist

    real = dist.init_process_group

    def joined(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            real("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.world)

    dist.init_process_group = torch_init = joined  # type: ignore[assignment]
    import torch

    torch.distributed.init_process_group = torch_init  # type: ignore[assignment]


def whole(ctx: Any, name: str, side: str) -> list[float]:
    """The losses of one loop of the page."""
    group_from(ctx)
    if side == "ours" or name == "lightning":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    found: dict[str, Any] = {"__name__": "script"}
    parts = fences()
    exec(compile(parts["shared"] + parts[f"{side} {name}"], f"{side} {name}", "exec"), found)
    return found["losses"]


def played(ctx: Any, section: str, folder: str, theirs: bool) -> list[str]:
    """The rows of one side, one after the other, in one script; what was run."""
    import contextlib

    import torch

    import unisono

    group_from(ctx)
    import torch.distributed as dist

    if not theirs or section == "Lightning":
        dist.init_process_group("gloo")
    found: dict[str, Any] = {
        "__name__": "script",
        "unisono": unisono,
        "path": Path(folder),
        "contextlib": contextlib,
    }
    exec(fences()["shared"], found)
    found["x"], found["y"] = found["samples"][:4]
    found["own_batches"] = [found["samples"][:3]] * (ctx.rank + 1)
    found["data"] = torch.utils.data.DataLoader(found["samples"], batch_size=8)
    found["schedule"] = torch.optim.lr_scheduler.ConstantLR(found["optimizer"])
    found["DataLoader"] = torch.utils.data.DataLoader
    begin(section, theirs, found)
    done = []
    for left, right in rows(section):
        code = re.match(r"`(.*?)`", right)
        line = left if theirs else code[1] if code and not right.startswith("nothing") else ""
        if not line or line.startswith("torchrun") or any(word in line for word in SHOWN if theirs):
            continue
        found["loss"] = torch.nn.functional.mse_loss(found["model"](found["x"]), found["y"])
        exec(compile(line, line, "exec"), found)
        done.append(line)
        if dist.is_initialized():
            dist.barrier()  # what the first rank writes is there for the others
        if "job.prepare" in line:
            found["x"], found["y"] = next(iter(found["data"]))
    return done


def begin(section: str, theirs: bool, found: dict[str, Any]) -> None:
    """A section's imports."""
    lines = ["import torch.distributed as dist", "from torch.nn.parallel import DistributedDataParallel",
             "from torch.utils.data import DistributedSampler"]  # fmt: skip
    if section == "Lightning":
        lines += [
            "from lightning.pytorch import Trainer",
            "from unisono_contrib.library.lightning import UnisonoStrategy",
        ]
    if section == "Accelerate" and theirs:
        lines += ["from accelerate import Accelerator", "from accelerate.utils import set_seed"]
    exec("\n".join(lines), found)


@pytest.mark.parametrize("section", ["PyTorch DDP", "Horovod", "DeepSpeed"])
@pytest.mark.timeout(120)
def test_our_rows_run(world: World, tmp_path: Path, section: str) -> None:
    one, other = world(played, 2, group=False, section=section, folder=str(tmp_path), theirs=False)
    assert one == other and len(one) >= 8


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("section", "theirs"), [("PyTorch DDP", True), ("Accelerate", False), ("Accelerate", True),
                                                 ("Lightning", False), ("Lightning", True)])  # fmt: skip
def test_rows_run_where_the_library_is_here(world: World, tmp_path: Path, section: str, theirs: bool) -> None:
    if find_spec({"PyTorch DDP": "torch"}.get(section, section.lower())) is None:
        pytest.skip(f"{section} is not installed")
    one, other = world(
        played, 2, group=False, section=section, folder=str(tmp_path), theirs=theirs, timeout=200.0
    )
    assert one == other and len(one) >= 3


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in LOOPS])
@pytest.mark.timeout(240)
def test_whole_loops_agree(world: World, name: str) -> None:
    if find_spec(LOOPS[name]) is None:
        pytest.skip(f"{name} is not installed")
    theirs = world(whole, 2, group=False, name=name, side="theirs", timeout=200.0)
    ours = world(whole, 2, group=False, name=name, side="ours", timeout=200.0)
    for rank in ours:
        assert len(rank) == 6 and rank == pytest.approx(theirs[0], abs=1e-6)


def test_every_section_has_rows() -> None:
    assert all(len(rows(section)) >= 4 for section in SECTIONS)
