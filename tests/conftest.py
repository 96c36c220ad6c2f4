"""Setup of all tests: one torch thread, since tensors are small, and deterministic hypothesis without deadlines."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "keel",
    deadline=None,
    derandomize=True,
    max_examples=8,
    # many properties are parametrized over every preset, each with a few examples
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("keel")
