"""Whether the kernels in C can be compiled here; what tests them says clearly when they cannot."""

import pytest

from keel.inference.kernels.build import load_kernels, unavailable_reason

needs_kernels = pytest.mark.skipif(
    load_kernels() is None, reason=f"kernels cannot be compiled here: {unavailable_reason()}"
)
