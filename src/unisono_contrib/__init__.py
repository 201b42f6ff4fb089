"""What few runs need: members of the families of `unisono`, found by the same names, and what belongs to them.

The rooms are those of `unisono`, which never imports this package (docs/adr/0034-core-and-contrib.md).
"""
