"""A live run from a recipe, a plan and a rank's place: the model, its first weights, its parts on this rank.

`rehearsal` builds the same run on tensors without numbers and counts what a step keeps and sends. May import
`train.foreign` (weights of others), `train.state`, `train.step` and `train.data`.
"""
