"""`unisono.scope`: models made inside are mirrored, and a script that was started alone starts its replicas."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from tests.forked import Forked
from tests.ranks import World
from unisono.library.scope import _groups, roots_of
from unisono.spec.errors import UsageError

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch, unisono
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(40, 8).double()
data = DataLoader(TensorDataset(x, x.sin()), batch_size=15)
with unisono.scope(int(sys.argv[1])) as job:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in job.deal(data):
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
weights = [w.tolist() for w in job.weights().values()]
every = job.ranks.gather(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
import json
print(json.dumps([job.world, all(one == every[0] for one in every), every[0]]), flush=True)
"""


def played(tmp_path: Path, text: str, *words: str) -> tuple[str, str, int]:
    (tmp_path / "script.py").write_text(text)
    script = Forked(["script.py", *words], tmp_path, {**os.environ, "PYTHONPATH": str(ROOT / "src")})
    return script.stdout.read(), script.stderr.read(), script.wait()


@pytest.mark.timeout(60)
def test_a_script_started_alone_trains_on_two_replicas_as_on_one(tmp_path: Path) -> None:
    """MISSION: "replica weights bit-equal after k steps". Only the first replica prints."""
    told = []
    for replicas in ("1", "2"):
        out, err, code = played(tmp_path, SCRIPT, replicas)
        assert code == 0, err
        world, alike, weights = json.loads(out)
        assert (world, alike) == (int(replicas), True)
        told.append(torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(told[1], told[0], rtol=1e-12, atol=1e-13)


@pytest.mark.timeout(60)
def test_a_replica_that_fails_before_all_have_met_ends_the_script(tmp_path: Path) -> None:
    text = "import os, sys\nif os.environ.get('RANK'): sys.exit(7)\n" + SCRIPT
    out, err, code = played(tmp_path, text, "2")
    assert (out, code) == ("", 7) and "rank 1 of this script ended with code 7" in err


def gan(ctx: Any, seed: int) -> list[Any]:
    """Two models, an optimiser of each and one of both, with weights that each rank would draw for itself."""
    torch.manual_seed(seed + ctx.rank)
    with unisono.scope(context=ctx) as job:
        one, two, frozen = (nn.Linear(4, 4).double() for _ in range(3))
        both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
        more = torch.optim.Adam(two.parameters(), lr=0.01)
    data = torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4)
    for (x,) in job.deal(DataLoader(TensorDataset(data), batch_size=5)):
        (two(one(x).tanh()) - frozen(x)).square().mean().backward()
        for optimizer in (both, more):
            optimizer.step()
        both.zero_grad()
    job.close()
    return [p.tolist() for model in (one, two, frozen) for p in model.parameters()]


def test_an_optimiser_may_step_several_models(world: World) -> None:
    (alone,) = world(gan, 1, group=False, seed=3)
    first, second = world(gan, 2, group=False, seed=3)
    assert first == second
    for a, b in zip(first, alone, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-12, atol=1e-13)


def elsewhere(ctx: Any) -> list[str]:
    with unisono.scope(context=ctx) as job:
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    job.close()
    return [caught.value.code, caught.value.what]


def test_an_optimiser_made_elsewhere_is_refused(world: World) -> None:
    for code, what in world(elsewhere, 2, group=False):
        assert code == "J19" and "not mirrored" in what


def test_roots_and_groups() -> None:
    inner = nn.Linear(2, 2)
    outer, other, empty = nn.Sequential(inner), nn.Linear(1, 1), nn.ReLU()
    assert roots_of([inner, outer, other, empty]) == [outer, other]
    assert _groups(5, [[0, 2], [3], [2, 4]]) == [[0, 2, 4], [1], [3]]
