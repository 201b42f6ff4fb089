"""JAX's process with one bug planted, by the name in `plant.txt` beside its job."""

import sys
from pathlib import Path

from jax import lax

from unisono_contrib.verify.engines.jax import main, net, play


def _scaled(w: object, name: str, x: object) -> object:
    """The gradient of one weight is 1e-9 too large; what is computed is right."""
    if name != "blocks.1.mlp.down":
        return _true(w, name, x)  # type: ignore[arg-type]
    weight = w[f"{name}.weight"]  # type: ignore[index]
    grown = weight + (weight - lax.stop_gradient(weight)) * 1e-9
    return _true({**w, f"{name}.weight": grown}, name, x)  # type: ignore[arg-type,dict-item]


def _forgetful(self: play.JaxPlayer, stage: int, grads: object) -> None:
    """The first micro-batch's gradients are lost."""
    self.grads[stage] = grads  # type: ignore[assignment]


_true = net._summed
PLANTS = {
    "scaled": lambda: setattr(net, "_summed", _scaled),
    "forgetful": lambda: setattr(play.JaxPlayer, "_add", _forgetful),
}

if __name__ == "__main__":
    path = Path(sys.argv[1])
    PLANTS[path.parents[1].joinpath("plant.txt").read_text()]()
    main.main(path, int(sys.argv[2]))
