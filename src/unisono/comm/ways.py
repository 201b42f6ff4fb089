"""How the ranks of each axis add up, gather, exchange and pass on: what a run says of it at its start."""

import torch

from unisono.comm.mesh import AXES, Mesh


def ways(mesh: Mesh, device: torch.device, messages: str = "") -> list[str]:
    """A line for each axis of several ranks: of `dp` what `collective` names, of others the best that is there.
    messages: how those of stages go. Every rank calls it, or it hangs."""
    lines = []
    for axis in ("dp", *(other for other in reversed(AXES) if other != "dp")):
        group = getattr(mesh, axis)
        if group.size > 1:
            group.near(device)  # what is not asked for is looked for here
            said = messages if axis == "pp" and messages else group.says()
            lines.append(f"collective: {said}" if axis == "dp" else f"{axis}: {said}")
    return lines
