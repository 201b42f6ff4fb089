"""One rank's side of a run, whoever started it.

`main` is the life of a rank that our launcher has forked, `under` of one that torchrun, Slurm, MPI or plain variables
started; the library way enters through `under` too. What both do stands in `body`. A rank talks with its supervisor
over `channel`, with the other ranks over `store`, meets them anew in `meetings`, and has a `watchdog` that notices a
hang. All but `channel` import torch.
"""
