"""Weights in the forms of others: those of DCP and Lightning written by themselves, those of DeepSpeed and Megatron in
the layout that they document. Nothing that a file names is run."""

import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.config import ModelConfig
from unisono.models.build import Facts, build
from unisono.models.init import initialise
from unisono.models.weights import read_box
from unisono.spec.errors import UsageError
from unisono.train.build.pretrained import layout_of
from unisono.train.foreign import open_weights
from unisono.train.state.checkpoint import Box, save

FIELDS = {
    "n_layer": 4, "n_head": 4, "n_kv_head": 2, "d_model": 16, "context": 8, "vocab": 64, "positions": "rotary",
    "norm": "rms", "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip
CONFIG = ModelConfig.model_validate(FIELDS)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    model = build(CONFIG, Facts(), "cpu")
    initialise(model, 3)
    return {name: p.detach() + 0.1 for name, p in model.named_parameters()}


def holds(path: Path, state: dict[str, torch.Tensor]) -> bool:
    """Whether all weights at a path are these, read whole and by boxes."""
    weights = open_weights(path)
    layout = layout_of(CONFIG, build(CONFIG, Facts()), weights)
    for name, whole in state.items():
        for start in ((0,) * whole.dim(), tuple(n // 3 for n in whole.shape)):
            out = torch.empty([n - s for n, s in zip(whole.shape, start, strict=True)])
            read_box(layout[name], weights, start, out)
            if not torch.equal(out, whole[tuple(slice(s, None) for s in start)]):
                return False
    return True


# Lightning, DCP ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lightning(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    torch.manual_seed(0)
    model = build(CONFIG, Facts(), "cpu")
    model.load_state_dict(state)

    class Tuned(lightning.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return 0.0 * self.net(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(Tuned(), torch.utils.data.DataLoader(torch.zeros(2, 8, dtype=torch.int64)))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert holds(tmp_path / "one.ckpt", state)


def dealt(ctx: Any, folder: str, whole: dict[str, torch.Tensor]) -> None:
    """Saves weights dealt over two ranks in two ways."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ctx.world,))
    placed = {
        name: distribute_tensor(x, mesh, [Shard(i % x.dim())], src_data_rank=None)
        for i, (name, x) in enumerate(whole.items())
    }
    optim = {"state": {name: {"exp_avg": torch.zeros_like(x)} for name, x in placed.items()}, "step": 3}
    dcp.save({"model": placed, "optim": optim}, checkpoint_id=folder)


def dealt_by_seed(ctx: Any, folder: str) -> None:
    model = build(CONFIG, Facts(), "cpu")
    initialise(model, 3)
    dealt(ctx, folder, {name: p.detach() + 0.1 for name, p in model.named_parameters()})


def test_dcp(state: dict[str, torch.Tensor], tmp_path: Path, world: Any) -> None:
    world(dealt_by_seed, 2, folder=str(tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert holds(tmp_path / "dcp", state)


# DeepSpeed -----------------------------------------------------------------------------------------------------------


class LossScaler:
    """As DeepSpeed keeps one in its files; whoever reads them does not have it."""

    def __init__(self) -> None:
        self.cur_scale = 1.0


class ZeroStageEnum(IntEnum):
    """As DeepSpeed writes a stage."""

    gradients = 2
    weights = 3


for kind, place in ((LossScaler, "loss_scaler"), (ZeroStageEnum, "config")):
    kind.__module__ = f"deepspeed.runtime.fp16.{place}"


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes can be pickled while this lasts."""
    import sys
    from types import ModuleType

    for kind in (LossScaler, ZeroStageEnum):
        names = kind.__module__.split(".")
        for i in range(1, len(names) + 1):
            name = ".".join(names[:i])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        setattr(sys.modules[kind.__module__], kind.__name__, kind)


def zero(folder: Path, state: dict[str, torch.Tensor], stage: int, ranks: int) -> None:
    step = folder / "global_step5"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    halves = [dict(list(state.items())[:7]), dict(list(state.items())[7:])]
    shapes = [OrderedDict((name, x.shape) for name, x in half.items()) for half in halves]
    about = {
        "module": {},
        "param_shapes": shapes,
        "buffer_names": [],
        "shared_params": {},
        "ds_version": "0.19",
    }
    stem = "mp_rank_00" if stage < 3 else "zero_pp_rank_0_mp_rank_00"
    torch.save(about, step / f"{stem}_model_states.pt")
    for rank in range(ranks):
        optim: dict[str, Any] = {"loss_scaler": LossScaler(), "zero_stage": ZeroStageEnum(stage)}
        if stage < 3:
            lines = []
            for half in halves:
                line = torch.cat([x.flatten() for x in half.values()])
                line = torch.cat([line, line.new_zeros(-len(line) % (2 * ranks))])
                lines.append(line.chunk(ranks)[rank].clone())
            optim["single_partition_of_fp32_groups"] = lines
        else:
            parts = []
            for x in state.values():
                flat = torch.cat([x.flatten(), x.new_zeros(-x.numel() % ranks)])
                parts.append(flat.chunk(ranks)[rank])
            optim["fp32_flat_groups"] = [torch.cat(parts[:4]), torch.cat(parts[4:])]
        torch.save({"optimizer_state_dict": optim}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(("stage", "ranks"), [(2, 3), (3, 3), (2, 1)])
def test_zero(
    stage: int, ranks: int, state: dict[str, torch.Tensor], tmp_path: Path, deepspeed: None
) -> None:
    zero(tmp_path, state, stage, ranks)
    assert holds(tmp_path, state)


def test_a_universal_one(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for name, x in state.items():
        (tmp_path / "zero" / name).mkdir(parents=True)
        torch.save({"param": x.clone(), "cat_dim": 0}, tmp_path / "zero" / name / "fp32.pt")
        torch.save({"param": torch.zeros_like(x)}, tmp_path / "zero" / name / "exp_avg.pt")
    assert holds(tmp_path, state)


# Megatron ------------------------------------------------------------------------------------------------------------


def megatron(folder: Path, state: dict[str, torch.Tensor], stages: int, ranks: int, fused: bool) -> None:
    """As Megatron-Core names weights; fused: as its fused layers do."""
    inside = folder / "iter_0000010"
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    each = FIELDS["n_layer"] // stages
    for stage in range(stages):
        for rank in range(ranks):
            model: dict[str, Any] = {}
            if stage == 0:
                model["embedding.word_embeddings.weight"] = (
                    state["stem.tok.weight"].chunk(ranks)[rank].clone()
                )
            for i in range(each):
                ours, theirs = f"blocks.{stage * each + i}", f"decoder.layers.{i}"
                one = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
                two = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
                model[f"{theirs}.{one}"] = state[f"{ours}.norm1.weight"]
                model[f"{theirs}.{two}"] = state[f"{ours}.norm2.weight"]
                qkv = state[f"{ours}.attn.qkv.weight"].chunk(ranks)[rank].clone()
                model[f"{theirs}.self_attention.linear_qkv.weight"] = qkv
                proj = state[f"{ours}.attn.proj.weight"].chunk(ranks, 1)[rank].clone()
                model[f"{theirs}.self_attention.linear_proj.weight"] = proj
                gated = [state[f"{ours}.mlp.{part}.weight"].chunk(ranks)[rank] for part in ("gate", "up")]
                model[f"{theirs}.mlp.linear_fc1.weight"] = torch.cat(gated)
                down = state[f"{ours}.mlp.down.weight"].chunk(ranks, 1)[rank].clone()
                model[f"{theirs}.mlp.linear_fc2.weight"] = down
                model[f"{theirs}.mlp.linear_fc2._extra_state"] = None
            if stage == stages - 1:
                model["decoder.final_layernorm.weight"] = state["head.norm.weight"]
                model["output_layer.weight"] = state["head.out.weight"].chunk(ranks)[rank].clone()
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            (inside / name).mkdir(parents=True)
            tree = {
                "args": Namespace(swiglu=True),
                "checkpoint_version": 3.0,
                "iteration": 10,
                "model": model,
            }
            torch.save(tree, inside / name / "model_optim_rng.pt")


@pytest.mark.parametrize(("stages", "ranks", "fused"), [(1, 1, False), (1, 2, True), (2, 2, False)])
def test_megatron(
    stages: int, ranks: int, fused: bool, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    megatron(tmp_path, state, stages, ranks, fused)
    assert holds(tmp_path, state)


def test_a_part_of_megatrons_is_missing(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    megatron(tmp_path, state, 2, 2, False)
    (tmp_path / "iter_0000010" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(UsageError, match="1 are missing"):
        open_weights(tmp_path)


# Harm ----------------------------------------------------------------------------------------------------------------


class Harm:
    """Loading it by pickle writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Evil:
    """The same by what builtins have."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("kind", [Harm, Evil])
def test_harm_is_refused(kind: Any, tmp_path: Path) -> None:
    mark = tmp_path / "harmed"
    torch.save({"state_dict": {"a": torch.ones(2)}, "hyper_parameters": kind(mark)}, tmp_path / "a.ckpt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": kind(mark)}))
    for path in (tmp_path / "a.ckpt", tmp_path / "dcp"):
        with pytest.raises(UsageError) as caught:
            open_weights(path)
        assert caught.value.code == "W05" and "\n" not in caught.value.what
        assert ("posix.system" if kind is Harm else "eval") in caught.value.what
    assert not mark.exists()


def test_what_a_user_pickled_is_inert(tmp_path: Path) -> None:
    """A class of a script that is not here, with attributes and items: nothing of it is needed."""
    settings = type("Settings", (dict,), {"__module__": "__main__"})
    import __main__

    __main__.Settings = settings  # type: ignore[attr-defined]
    try:
        torch.save({"state_dict": {"a.b": torch.ones(2)}, "mine": settings(x=1)}, tmp_path / "a.pt")
    finally:
        del __main__.Settings  # type: ignore[attr-defined]
    assert torch.equal(open_weights(tmp_path / "a.pt").box("a.b", (1,), (1,)), torch.ones(1))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        with pytest.raises(UsageError, match=words) as caught:
            open_weights(path)
        assert caught.value.code == "W01" and caught.value.fix

    refused(tmp_path / "nothing", "not there")
    refused(tmp_path, "no weights in a form")
    (tmp_path / "a.pt").write_bytes(b"no zip")
    refused(tmp_path / "a.pt", "torch.save")
    torch.save({"x": 3}, tmp_path / "b.pt")
    refused(tmp_path / "b.pt", "no dictionary of tensors")
    torch.save({"x": torch.ones(100)}, tmp_path / "c.pt")
    whole = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "c.pt", "cannot read weights")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refused(tmp_path / "dcp", "no metadata")


def test_a_name_of_runs_means_the_newest_that_has_a_checkpoint(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    for run, more in (("20260101-000000-ffff", 1.0), ("20260102-000000-aaaa", 0.0)):
        boxes = [Box(f"model/{n}", tuple(x.shape), (0,) * x.dim(), x + more) for n, x in state.items()]
        save(tmp_path / "mine" / run, 3, boxes, {"step": 3})
    (tmp_path / "mine" / "20260103-000000-aaaa" / "checkpoints").mkdir(parents=True)  # it has just begun
    (tmp_path / "mine" / "latest").symlink_to("20260101-000000-ffff")
    assert holds(tmp_path / "mine", state)
    with pytest.raises(UsageError) as caught:
        open_weights(tmp_path)
    assert caught.value.code == "W01"
