"""One silent bug a file, called by its issue. ADDRESS: of the issue. CAUSE: what a good explanation says of it.

`right(rank)` and `wrong(rank)` are the loop without the bug and with it. `reference()` is what one device makes, for
`unisono.check_gradients`; or `Step` says it, for `unisono.check_updates`. With an ADAPTER the two are options of this
stack, RIGHT and WRONG, for `unisono.check_stack`. NEEDS: a package without which a bug is not played.
"""
