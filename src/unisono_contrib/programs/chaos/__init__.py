"""Faults as data: what goes wrong, in which rank and at which moment; what was seen of it; what every step was made of.

A script of faults has several interpreters: `train.recovery.scripted_faults` plays it inside of ranks, `sequel` tells
what followed each fault, `counted` proves that no step lost or doubled a leaf meanwhile. No torch.
"""
