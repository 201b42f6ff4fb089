"""Training on one rank, in rooms one above the other; import-linter keeps the order (docs/adr/0031-rooms-of-train.md).

`session` plays the loop over a `live` run. Below it: `recovery`, `build` and `watch`, `state`, `step`, `data`. Families
of members, such as `optim` and `losses`, stand beside them.
"""
