"""A conformance suite for training signals: does a loss do what it says, in any layout, with any junk beside it?"""

from keel.audit.declaration import Declaration, declare
from keel.audit.suite import CLASSES, Finding, Report, audit
from keel.audit.target import TargetError

__all__ = ["CLASSES", "Declaration", "Finding", "Report", "TargetError", "audit", "declare"]
