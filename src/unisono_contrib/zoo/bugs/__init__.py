"""One silent bug a file. Each has `reference()`, what one device makes, and `right(rank)` and `wrong(rank)`, the loop
without and with the bug; or a `Step` and its subclass `Wrong`, for `unisono.check_stack`."""
