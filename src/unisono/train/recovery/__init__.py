"""How a run outlives lost ranks: snapshots in memory, their replicas on other hosts, and state restored from peers.

`drain` saves within a step that outlasts the grace of a scheduler; `fault_injection` plays the faults of a script on
this rank. How a session goes on afterwards is `train/rejoin.py`. May import all other rooms of `train`.
"""
