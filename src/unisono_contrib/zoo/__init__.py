"""The zoo: silent bugs of public stacks, each rebuilt from its issue in a few lines, beside the same code without it.

`python -m unisono_contrib.zoo` plays all of them and prints what Unisono says of each. A bug is a file of `bugs/`, by
whose name it is called; nothing else lists it.
"""
