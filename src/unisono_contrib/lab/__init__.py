"""A slow network on one machine: "hosts" that are name spaces of the kernel, joined by links of a given rate and delay.

Nothing in here has a name that outlives it. A host's network is a file that the lab holds open, its processes live in a
name space of their own, and the kernel takes both away with the process that made them, however that ends. No torch.
"""
