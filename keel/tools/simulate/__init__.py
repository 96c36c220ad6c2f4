"""Predict a run's throughput: the real scheduler on a virtual clock, with engines and trainer modelled by their speeds.

`virtual_clock` is the event loop, `engines` and `simulated_pool` model sampling and its failures, `publishing` the
transfer of weights, `simulated_run` the training loop, `prediction` summarises its steps, `bottleneck` explains what
limits the run and proposes changes, and `calibrate` measures speeds and lengths from a real run. No tokens or gradients
are computed, so nothing is predicted about what the model learns.
"""
