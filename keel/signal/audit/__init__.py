"""Audit a loss for known silent failures, through nothing but its value and its gradient."""

from keel.signal.audit.declaration import Declaration, declare
from keel.signal.audit.suite import CLASSES, Finding, Report, audit
from keel.signal.audit.target import LossError, TargetError

__all__ = ["CLASSES", "Declaration", "Finding", "LossError", "Report", "TargetError", "audit", "declare"]
