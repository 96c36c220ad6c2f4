"""Setup of the tests inside other trainers: no telemetry."""

import pytest


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports the use of a trainer unless it runs in continuous integration."""
    monkeypatch.setenv("CI", "1")
