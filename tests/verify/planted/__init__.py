"""Bugs as text: a line of the source that is replaced by a wrong one, and who should find it."""
