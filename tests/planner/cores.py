"""A small model on a CPU host whose ranks share its cores, as `unisono calibrate` writes it down."""

from pathlib import Path

from tests.planner.published import gpt
from unisono.measure.calibrate import MeasuredMachine, as_toml
from unisono.planner.clusters import cluster
from unisono.planner.machines.cluster import Cluster
from unisono.planner.predict import of_ranks

MODEL = gpt(4, 4, 128, 64)
MACHINE = MeasuredMachine(
    device="core", count=2, peak={"fp32": 9e10}, memory=1e10, bandwidth=3e10, reserved=3e8, link=(1e9, 2e-4)
)


def here(folder: Path, ranks: int = 4) -> Cluster:
    """The machine with so many ranks."""
    path = folder / "here.toml"
    path.write_text(as_toml(MACHINE, "a test"))
    return of_ranks(cluster(str(path)), ranks)
