"""Streams: shards in folders or object stores, read while a run trains, in an order that no layout changes.

Nothing is imported here. `store` reaches shards, `formats` read them, `index` counts samples, `order` mixes them,
`parts` keeps what was read, `text` and `pictures` are the data sets.
"""
