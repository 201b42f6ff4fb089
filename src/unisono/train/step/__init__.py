"""One optimiser step: forward and backward over a timetable, gradients on their way out and back, clipping, the update.

`train_step` is the step, `Run` what it works with, `join` makes a run among certain members. `overlap` finds what plays
steps that overlap. May import `train.data` and the floors below `train`.
"""
