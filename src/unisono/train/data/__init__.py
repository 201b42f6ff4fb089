"""Real input, dealt as virtual shards: sources, the order of samples, and the batches of one rank.

Nothing is imported here: `sources/` declares without torch, `load` opens, `feed` deals.
"""
