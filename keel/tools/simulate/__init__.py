"""A run before it is run: the real scheduler on a virtual clock, with engines and a trainer that only take their time.

`clock` is the loop, `engines` the samplers and what goes wrong with them, `world` the run, `prediction` what comes of
it, `advice` what holds it up and what to change, `measure` what a real run tells about speeds and lengths. It computes
no tokens and no gradients, and says nothing about what is learned.
"""
