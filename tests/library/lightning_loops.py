"""A LightningModule as its users write it, under Lightning alone and under a plan of ours. Imported by the tests."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from tests.library.loops import Net, samples
from unisono.library import init
from unisono_contrib.library.lightning import UnisonoStrategy


class Classifier(LightningModule):
    """Metrics by step and by epoch, a schedule, validation."""

    def __init__(self, through: str = "classifier") -> None:
        super().__init__()
        self.net = Net().double()
        self.through, self.seen = through, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        out = self(x) if self.through != "net" else self.net(x)
        loss = F.cross_entropy(out, y)
        if self.through == "gathered":
            loss = F.cross_entropy(self.all_gather(out, sync_grads=True)[0], y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss_step"]))

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("val", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Adversaries(LightningModule):
    """Two networks and two optimisers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(3, 6).double(), nn.Linear(6, 1).double()
        self.seen: list[float] = []

    def training_step(self, batch: Any, _: int) -> None:
        x, y = batch
        first, second = self.optimizers()  # type: ignore[misc]
        made = self.maker(F.one_hot(y, 3).double())
        for optimizer, loss in (
            (second, F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(made.detach())).mean()),
            (first, lambda: F.softplus(-self.judge(made)).mean()),
        ):
            loss = loss() if callable(loss) else loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss, sync_dist=True)
            self.seen.append(float(self.trainer.strategy.reduce(loss.detach())))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (self.maker, self.judge)]


def fit(
    strategy: Any,
    folder: str,
    kind: str = "classifier",
    *,
    epochs: int = 2,
    resume: bool = False,
    validate: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Lightning's own loop; what it came to."""
    torch.manual_seed(3)
    module: Any = Adversaries() if kind == "adversaries" else Classifier({"part": "net"}.get(kind, kind))
    torch.manual_seed(4)
    data = DataLoader(samples(50), batch_size=12, shuffle=True)
    held_out = DataLoader(samples(21), batch_size=8)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_model_summary=False,
        enable_progress_bar=False, default_root_dir=folder, enable_checkpointing=False, **options,
    )  # fmt: skip
    path = str(Path(folder) / "last.ckpt")
    trainer.fit(module, data, held_out if validate else None, ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    weights = torch.load(path, weights_only=True)["state_dict"]
    tested = trainer.validate(module, held_out, verbose=False) if validate else []
    return {"losses": module.seen, "metrics": metrics, "steps": trainer.global_step, "tested": tested,
            "weights": {k: v.flatten().tolist() for k, v in weights.items()}}  # fmt: skip


def alone(ctx: Any, **options: Any) -> dict[str, Any]:
    return fit("auto", **options)


def on_ranks(ctx: Any, plan: str, **options: Any) -> dict[str, Any]:
    return fit(UnisonoStrategy(job=init(plan, context=ctx)), **options)


def loop(job: Any) -> None:
    """To be proven."""
    torch.manual_seed(3)
    data = DataLoader(samples(24), batch_size=8, shuffle=True)
    trainer = Trainer(
        strategy=UnisonoStrategy(job=job), accelerator="cpu", devices=1, max_epochs=2, logger=False,
        enable_model_summary=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Classifier(), data)
