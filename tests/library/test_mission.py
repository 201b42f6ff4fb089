"""The systems that the founding texts name: what covering each means, one test a sentence, as far as it is there.

Some stand with what they are about: parameter servers in `tests/verbs/test_tf_config.py`, remote calls in `tests/rpc`,
Adasum in `tests/sync/test_adasum.py`, AdaScale in `tests/train/step/test_adascale.py`, Ray in `tests/sweep`. Not there yet,
and so without a test: TPUStrategy, Kubernetes; of Horovod the fp16 wire; of FairScale skip connections; of NCCL the trees.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.library import loops, mending, missions
from tests.ranks import World
from tests.threads import prove
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.launch import env
from unisono.plan import Plan
from unisono.programs.balance import balance
from unisono.programs.pipeline import bubble, play_costs
from unisono.programs.schedules import SCHEDULES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]


def recipe(**train: Any) -> Recipe:
    """A GPT with dropout, tied embeddings, clipping and AdamW."""
    given = {
        "steps": 6,
        "global_batch": 8,
        "micro_batch": 1,
        "dtype": "float64",
        "lr": 1e-2,
        "clip": 0.5,
        **train,
    }
    model = ModelConfig(n_layer=4, n_head=4, d_model=16, context=8, dropout=0.1)
    return Recipe(seed=3, model=model, train=TrainConfig(**given))


def proven(*plans: str, steps: int = 3) -> list[Any]:
    found = prove(recipe(), [Plan.parse(text) for text in plans], steps)
    assert all(proof.passed for proof in found), [str(proof) for proof in found if not proof.passed]
    return found


def far(one: Any, other: Any) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def test_horovod_in_few_lines_with_join_and_fused_buffers(threads: World) -> None:
    """At most five lines; two ranks match one process to 1e-6; buffers are fused; uneven steps."""
    script = (ROOT / "examples" / "own_loop.py").read_text()
    assert len(re.findall(r"# [1-5]\b", script)) <= 5
    (alone,) = threads(loops.alone, 1, group=False, each={"ordinary": {}})
    for rank in threads(loops.on_ranks, 2, group=False, plan="dp=2", each={"ordinary": {}}):
        assert far(rank["ordinary"]["losses"], alone["ordinary"]["losses"]) < 1e-6
    (want,) = threads(mending.joined_alone, 1, group=False, parts=3)
    for rank in threads(mending.joined, 3, group=False, plan="dp=3", parts=3):
        assert far(rank["losses"], want["losses"]) < 1e-6


def test_ddp_gradients_no_sync_unused_names_and_overlap(world: World) -> None:
    """Equal to DistributedDataParallel to 1e-7, with accumulation; unused parameters are named; reduction starts before
    backward ends, in fewer messages than there are parameters."""
    for rank in world(missions.beside_ddp, 2):
        assert max(rank["off"]) < 1e-7
    for rank in world(missions.unused_and_early, 2, group=False):
        assert rank["unused"] == ["spare.bias", "spare.weight"] and rank["early"]
        assert 0 < rank["messages"] < rank["parameters"]


def test_fsdp_modes_bytes_and_reloading(threads: World, tmp_path: Path) -> None:
    """Full, gradients alone, hybrid, none: gradients match one process; bytes of parameters fall as 1/N within padding;
    saved at 2 ranks, loaded at 1, 3 and 4."""
    proven("shard=4", "shard=4 zero=2", "dp=2 shard=2", "dp=4")
    (whole,) = threads(missions.held, 1, group=False, plan="dp=1")
    for ranks in (2, 4):
        plan = f"shard={ranks}"
        padding = 7 * 64 * 8 * ranks  # a row of each tensor
        for rank in threads(missions.held, ranks, group=False, plan=plan):
            assert rank["bytes"]["parameters"] <= whole["bytes"]["parameters"] / ranks + padding
    folder = str(tmp_path)
    saved = threads(missions.held, 2, group=False, plan="shard=2", steps=4, folder=folder, save=True)
    for ranks in (1, 3, 4):
        plan = f"shard={ranks}" if ranks > 1 else "dp=1"
        for rank in threads(missions.held, ranks, group=False, plan=plan, folder=folder):
            assert rank["weights"] == saved[0]["weights"]


def test_mirrored_replicas_are_bit_equal_after_steps(threads: World) -> None:
    """One entry, and replicas whose weights are equal to the bit."""
    ranks = threads(loops.on_ranks, 3, group=False, plan="dp=3", each={"ordinary": {}})
    assert all(rank["ordinary"]["weights"] == ranks[0]["ordinary"]["weights"] for rank in ranks)


def test_multi_worker_by_variables_of_two_hosts() -> None:
    """The same script on two hosts, whose places follow from the environment."""
    both = [
        env.detect({"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "first", "MASTER_PORT": "29511"})
        for rank in range(4)
    ]  # fmt: skip
    assert [(p.rank, p.local_rank, p.local_world, p.master) for p in both if p] == [
        (0, 0, 2, "first"), (1, 1, 2, "first"), (2, 0, 2, "first"), (3, 1, 2, "first"),
    ]  # fmt: skip


@pytest.mark.parametrize("micro", [1, 2])
def test_zero_stages_shrink_bytes_and_leave_fifty_losses_alone(threads: World, micro: int) -> None:
    """Stage 1 shrinks the optimiser, 2 the gradients too, 3 the parameters too; losses are those of stage 0."""
    (zero,) = threads(missions.held, 1, group=False, plan="dp=1", steps=52, micro=micro)
    fewer = {1: {"optimizer"}, 2: {"optimizer", "gradients"}, 3: {"optimizer", "gradients", "parameters"}}
    for stage, names in fewer.items():
        for rank in threads(
            missions.held, 2, group=False, plan=f"shard=2 zero={stage}", steps=52, micro=micro
        ):
            assert far(rank["losses"], zero["losses"]) < 1e-9
            for name in names:
                assert rank["bytes"][name] < 0.6 * zero["bytes"][name], (stage, name)


def test_offload_makes_the_updates_of_memory() -> None:
    """Optimiser, or parameters as well, in another store: the same bits."""
    assert all(
        proof.bit_identical
        for proof in proven("offload=optimizer", "offload=params", "offload=params:to=disk")
    )


def test_deepspeeds_pipeline_with_tied_layers_and_zero() -> None:
    """1F1B with a tied embedding beside ZeRO-1 and, beyond DeepSpeed, ZeRO-2."""
    proven("pp=2 shard=2 zero=1 schedule=1f1b", "pp=2 shard=2 zero=2 schedule=1f1b")


def test_megatrons_three_dims_on_eight_ranks() -> None:
    """Columns, rows, a vocabulary in parts and sequence parallelism: TP2 x PP2 x DP2 equals one process."""
    proven("dp=2 tp=2 pp=2", "tp=2 pp=2")


def test_fairscales_sharding_balance_and_recomputed_activations() -> None:
    """Sharded optimiser beside replicas; a pipe balanced by cost; recomputing, with dropout, gives the same bits."""
    proven("dp=2 shard=2 zero=1")
    assert [len(blocks) for blocks in balance([1.0] * 6, 0.0, 4.0, 2)] == [5, 1]
    assert all(proof.bit_identical for proof in proven("recompute=full", "pp=2 recompute=full"))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("micros", [1, 4, 16])
def test_gpipes_idle_slots(ranks: int, micros: int) -> None:
    """(p - 1) / (m + p - 1) on stages of unit cost."""
    placed = play_costs(SCHEDULES.read("gpipe").timetable(ranks, micros), forward=1.0, backward=1.0)
    assert bubble(placed) == pytest.approx((ranks - 1) / (micros + ranks - 1))


def test_gpipes_gradients_are_exact() -> None:
    assert all(proof.bit_identical for proof in proven("pp=2 schedule=gpipe", "pp=4 schedule=gpipe"))


def test_pipedreams_versions_and_partitioner() -> None:
    """Both variants are one device that uses the versions of the formula; the partitioner balances a skewed model."""
    plain = recipe(clip=0, global_batch=4)
    plans = [Plan.parse(f"pp=2 schedule={name}") for name in ("pipedream", "pipedream:buffers=2")]
    for proof in prove(plain, plans, 4):
        assert proof.passed and proof.fidelity.lower() == "lossy", str(proof)
    assert [len(blocks) for blocks in balance([1.0, 1.0, 1.0, 9.0], 0.0, 0.0, 2)] == [3, 1]


@pytest.mark.parametrize("text", ["messages", "engine"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_nccls_surface_by_our_algorithms(threads: World, text: str, ranks: int) -> None:
    """Results equal the engine's, bytes those of theory."""
    for numel in (5, 40_000):
        for rank in threads(missions.collectives, ranks, text=text, numel=numel):
            assert rank["off"] < 1e-9 and rank["sent"] == rank["law"] > 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gloo_is_the_default_at_any_number(world: World, ranks: int) -> None:
    """Sums of even and uneven sizes, on processes."""
    for numel in (1, 7, 1001) if ranks > 1 else ():
        for rank in world(missions.collectives, ranks, text="auto", numel=numel):
            assert rank["off"] < 1e-9
    (first, *_) = world(mending.talk, 2, group=False, folder=".") if ranks == 2 else ({"each": [0, 1]},)
    assert first["each"] == [0, 1]


def test_mpis_and_slurms_variables_say_which_rank_this_is() -> None:
    """Of OpenMPI, of PMI, and of Slurm with a list of nodes."""
    mpi = env.detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})  # fmt: skip
    slurm = env.detect({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9", "SLURM_PROCID": "5", "SLURM_NTASKS": "8",
                        "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]",
                        "SLURM_STEP_TASKS_PER_NODE": "4(x2)"})  # fmt: skip
    assert mpi is not None and (mpi.rank, mpi.world) == (1, 2)
    assert slurm is not None and (slurm.rank, slurm.world, slurm.local_rank, slurm.master) == (
        5,
        8,
        1,
        "gpu07",
    )
