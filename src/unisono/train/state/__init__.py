"""What a run keeps on disk: checkpoints, when they come, which one a run goes on from, its history, measured choices.

`run_state` says which tensors make up the state, `checkpoint/` reads and writes them, `saving` plays the saves of a
session. May import `train.step` and `train.data`.
"""
