"""The life of a run's workers as one pure state machine: events in, commands out. No I/O, no clock, no torch.

    state, commands = handle(state, event, now)

`events` says what may happen, `commands` what may be done about it, `state` what is known, `membership` who is where,
`machine` what follows from an event, `meeting` how the workers of an epoch meet, `ending` how a run ends, and `verdict`
who broke it.
`launch.loop` turns bytes into events, and plays the commands.
"""
