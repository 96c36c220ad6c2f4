"""Evaluate several objectives offline on the same recorded tokens: what each keeps, drops and optimises.

Reads a run folder, or a parquet or JSON-lines file of another trainer, one step in memory at a time, and evaluates each
objective on the complete step, exactly as the trainer would. Takes no optimizer step and changes none of its inputs.
`readers` reads, `evaluate` evaluates, `report` summarises, `html` and `long_table` write files.
"""

from keel.tools.compare.candidates import Candidate, parse_candidates
from keel.tools.compare.evaluate import Comparison
from keel.tools.compare.readers import Recording, parse_steps
from keel.tools.compare.report import ComparisonReport

__all__ = ["Candidate", "Comparison", "ComparisonReport", "Recording", "parse_candidates", "parse_steps"]
