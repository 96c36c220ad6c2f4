"""The isolations that the sandbox tests run under."""

import pytest

from keel.rollout.environments.rewards import sandbox


@pytest.fixture
def bubblewrap() -> None:
    if sandbox.isolation() != "bubblewrap":
        pytest.skip("bubblewrap does not work on this machine")


@pytest.fixture(params=["bubblewrap", "rlimits"])
def either_isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap")
    else:
        monkeypatch.setattr(sandbox, "isolation", lambda: "rlimits")
    return str(request.param)
