"""Parameter servers: the weights and their optimiser lie with servers, and replicas push gradients and pull weights.

    rules        when a replica may read, and which gradients an update takes: bounded staleness, none, a quorum
    sequencer    the one order in which updates and reads happen, decided by a rule; it sees numbers, no tensors
    shard        some of the parameters with their optimiser; it carries the order out
    simulate     the same run by an event list, as an oracle of staleness
    wire         messages as bytes, over authenticated connections
    host         the threads of one rank on which a sequencer and a shard live
    salvage      what is left after a rank was lost
    worker       a replica's side, an `OuterSync`

sequencer and shard do no input or output: a message in, messages out.
"""
