"""`[network]`: how ranks of a job reach each other, in one place. No torch."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unisono.spec.section import Section
from unisono.spec.training import Natural

_NAMES = r"^[^\s]*$"


class NetworkConfig(Section):
    """The profile of a cluster's network, which `unisono launch` sets as variables of Gloo and NCCL on all ranks.
    Without it each rank looks for the fastest device that leads to the first one. A site keeps it in a file that
    recipes extend: `extends = "site.toml"`."""

    name: ClassVar[str] = "network"

    interface: Annotated[str, Field(pattern=_NAMES)] = Field(
        default="", description="network device: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )
    infiniband: bool | None = Field(
        default=None,
        description="false: NCCL uses sockets alone (NCCL_IB_DISABLE); true: it may not fall back to them",
    )
    hca: Annotated[str, Field(pattern=_NAMES)] = Field(
        default="", description="InfiniBand or RoCE ports: NCCL_IB_HCA, such as mlx5_0:1,mlx5_1:1"
    )
    gid_index: Natural | None = Field(default=None, description="RoCE: NCCL_IB_GID_INDEX, often 3")
    traffic_class: Natural | None = Field(default=None, description="RoCE: NCCL_IB_TC")
    gpu_direct: Literal["", "LOC", "PIX", "PXB", "PHB", "SYS"] = Field(
        default="", description="farthest NIC that a GPU writes to itself: NCCL_NET_GDR_LEVEL"
    )

    def variables(self) -> dict[str, str]:
        """The variables of every rank."""
        known: dict[str, Any] = {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            "NCCL_IB_DISABLE": "1" if self.infiniband is False else "",
            "NCCL_NET": "IB" if self.infiniband else "",
            "NCCL_IB_HCA": self.hca,
            "NCCL_IB_GID_INDEX": self.gid_index,
            "NCCL_IB_TC": self.traffic_class,
            "NCCL_NET_GDR_LEVEL": self.gpu_direct,
        }
        return {name: str(value) for name, value in known.items() if value not in (None, "")}
