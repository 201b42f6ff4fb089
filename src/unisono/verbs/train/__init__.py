"""`unisono train`: the side of the supervisor, and `rank.py`, which every rank plays."""
