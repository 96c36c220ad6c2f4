"""Whether the kernels in C can be compiled here; what tests them says clearly when they cannot."""

import pytest

from keel.inference.kernels.build import library, why_not

needs_kernels = pytest.mark.skipif(library() is None, reason=f"kernels cannot be compiled here: {why_not()}")
