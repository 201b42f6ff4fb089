"""What the backend of torch.distributed does by itself: Gloo between CPUs, NCCL between GPUs."""

from typing import TYPE_CHECKING

from unisono.comm.collectives import Collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from unisono.comm.collectives.engine.live import EngineAlgorithm


class Engine(Collective):
    """The backend's own collectives: Gloo's between CPUs, NCCL's between GPUs."""

    name = "engine"

    def bind(self, pg: "ProcessGroup", axis: str) -> "EngineAlgorithm":
        from unisono.comm.collectives.engine.live import EngineAlgorithm

        return EngineAlgorithm(self, pg)
