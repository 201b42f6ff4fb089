"""A search over values of a recipe: many training runs side by side, each with other values. No torch.

`spec` reads what is searched, `space` draws values, a file of `methods` decides what trains next, `progress` is what is
known of all trials, `journal` keeps it on disk, `trial` is one run as a child process, a file of `places` starts such
runs, `room` says how many fit on this machine, `schedule` is the loop over all of these, and `page` draws the result.
"""
