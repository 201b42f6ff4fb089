"""Models: a folder a kind, and what all kinds share. Declarations import no torch.

`models/gpt/__init__.py` declares the kind (a `spec.model.ModelConfig`): its keys, what may be dealt, what it costs. The
module itself is in `net.py`. A module knows nothing of parallelism and has three parts, `stem(inputs, noise)`,
`blocks[i](x, noise)` and `head(x)`, a summed `loss`, and an `anatomy` that says what may be cut where.
"""
