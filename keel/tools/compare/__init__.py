"""Several objectives on the same recorded tokens, offline: what each keeps, drops and pulls towards.

Reads a run folder, or a parquet or JSON-lines file of another trainer, one step in memory at a time, and calls each
objective on the whole step, exactly as the trainer would. It takes no optimizer step and changes nothing in what it
reads. `tokens` reads, `evaluate` evaluates, `report` tabulates, `page` and `long` render.
"""

from keel.tools.compare.candidates import Candidate, parse_candidates
from keel.tools.compare.evaluate import Comparison
from keel.tools.compare.readers import Recording, parse_steps
from keel.tools.compare.report import ComparisonReport

__all__ = ["Candidate", "Comparison", "ComparisonReport", "Recording", "parse_candidates", "parse_steps"]
