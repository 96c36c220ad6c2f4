"""Set-up shared by all tests: one thread, since the tensors are small, and hypothesis without clocks or chance."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "keel",
    deadline=None,
    derandomize=True,
    max_examples=8,
    # many properties are parametrised over every recipe, each with its own few examples
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("keel")
