"""The verdict on a run: what limited it, by which figures, what to change, and what that would gain.

`gather` reads the figures out of a run's record, `judge` weighs them. Both are pure, and import no torch.
"""
