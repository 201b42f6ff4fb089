"""What a plan costs on a cluster: memory, time, and why. Closed forms, no torch."""
