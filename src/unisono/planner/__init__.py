"""Price a plan on a cluster: seconds of a step, memory, and the reasons. Imports no torch.

A price is made in three steps.

- Count. `work/` lists what a step runs, by model, plan and the habits of the software. `blocks`
  counts one pass over a part of a transformer (products, bytes moved, kernels, calls), `networks` the same of other
  models, `activations` what stays for the backward pass.
- Time. A device under a stack gives these lists seconds: `machines/chip.Timer`, with the networks of the plan's axes.
- Play. `price` composes a step of such passes, and `pipeline_play` plays its timetable.

`pricing` is the door: it takes a `request.PlanRequest`. `simulate` answers one, `search` finds the best of all plans,
`explanation` and `formatting` say why in words.

A new axis adds its calls, and what it takes off products and bytes, to `work/blocks.block`, and what it keeps to
`work/activations.block_bytes`. Its network stands in `machines/chip.AxisNetworks`. tests/planner/test_one_count.py
holds what is priced to what a rank sends when the program itself is rehearsed.
"""
