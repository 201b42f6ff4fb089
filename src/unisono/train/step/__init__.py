"""One optimiser step: forward and backward over a timetable, gradients on their way out and back, clipping, the update.

`train_step` is the step, `Run` what it works with, `join` makes a run among certain members. `flow` and `ahead` are the
two kinds of step whose updates come at other times. May import `train.data` and the floors below `train`.
"""
