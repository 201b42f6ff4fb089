"""What the verbs do: each has a part that watches (no torch) and, in `*_rank.py`, a part that every rank plays."""
