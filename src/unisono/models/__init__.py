"""Models: plain modules that know nothing of parallelism, and how a recipe names them.

Every model has three parts, `stem(inputs, noise)`, `blocks[i](x, noise)` and `head(x)`, a summed `loss`, and an
`anatomy` that says what may be cut where.
"""

from unisono.models.build import Facts, build

__all__ = ["Facts", "build"]
