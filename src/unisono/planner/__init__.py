"""What a plan costs on a cluster: memory, time, and why. Count, then time, then play; no torch.

- Count: `work/` lists what runs. It depends on the model, the plan and the habits of the software alone. `blocks` says
  what one pass over a part of a transformer does (products, bytes moved, kernels, calls), `networks` the same of other
  models, `inside` and `calls` what our own ranks send, `kept` and `transformer` what stays for the backward pass.
- Time: a machine gives lists seconds. `machines/chip` is a device under a stack with its networks (`Timer.of`), `host`
  and `machines/host` are ranks that share cores.
- Play: `price` composes a step of passes that take so long, and `played` or `host` plays its timetable. `priced` is the
  one door for all of it.

A new axis adds its calls and what it takes off products and bytes to `work/blocks.block`, its calls in a pass of ours
to `work/inside.of_pass` (those of a step to `work/calls.calls`), and what it keeps to `work/kept.block_bytes`. No file
outside `work/` has to know it, but for the network it meets over: `machines/chip.AxisNetworks`. What is computed a
second time stands in `work/blocks.again`.
"""
