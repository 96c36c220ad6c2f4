"""Audit a loss function before it trains: a run with one that fails does not start."""

from collections.abc import Callable

from keel.errors import ConfigError
from keel.signal.audit.declaration import Declaration
from keel.signal.audit.probe_batches import random_batches
from keel.signal.audit.suite import Finding, audit
from keel.signal.audit.target import TargetError
from keel.signal.function_objective import FunctionObjective


def check_loss_function(objective: FunctionObjective, notice: Callable[[str], None]) -> None:
    """Audit a loss function; raise with its findings, or pass them to `notice` if objective.audit is "warn"."""
    try:
        report = audit(objective.function)
    except TargetError as error:
        raise ConfigError(
            f'objective.name = "{objective.name}": {error}{_reads_hint(objective, str(error))}'
        ) from error
    if report.passed:
        declaration = getattr(objective.function, "keel_declaration", Declaration())
        for batch in random_batches(declaration, seed=0):
            objective(batch)  # raises if a token that it drops has a gradient
        return
    findings = [finding for finding in report.findings if finding.status in ("failed", "error")]
    problem = f'objective.name = "{objective.name}" fails the audit:\n' + "\n".join(map(_describe, findings))
    if objective.settings.audit == "warn":
        notice(f'{problem}\nit trains nevertheless, because objective.audit = "warn"')
        return
    raise ConfigError(
        f"{problem}{_reads_hint(objective, problem)}\n`keel audit {objective.name}` prints a batch for each; correct"
        ' the function, declare what is intended with @keel.declare, or set objective.audit = "warn"'
    )


def _describe(finding: Finding) -> str:
    return f"  {finding.letter}. {finding.title}: {finding.message}"


def _reads_hint(objective: FunctionObjective, problem: str) -> str:
    if "NoneType" not in problem:
        return ""
    return f"\nlog-probs that are not in objective.reads = {objective.settings.reads} are None in its batch"
