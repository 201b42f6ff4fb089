"""What looks at a run while it trains: the journal of its steps, the guard of replicas, and steps with bad numbers.

Nothing here changes a step that is good; `bad_steps` decides what becomes of one that is not. May import `train.state`,
`train.step` and `train.data`.
"""
