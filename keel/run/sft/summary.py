"""Summarise a run of supervised fine-tuning in a few lines, from the ledger alone."""

from keel.run.folder import RunFolder


def summarize_sft(folder: RunFolder) -> str:
    """Return the losses, what was trained on, and how to continue from the result."""
    ledger, path = folder.ledger, folder.path
    steps, evaluations = ledger.steps(), ledger.evaluations()
    lines = []
    losses = [(step, metrics["loss"]) for step, _, metrics in evaluations if "loss" in metrics]
    if losses:
        shown = losses if len(losses) < 2 else [losses[0], losses[-1]]
        tokens = evaluations[-1][2].get("tokens", 0.0)
        values = " -> ".join(f"{loss:.4f} after step {step}" for step, loss in shown)
        lines.append(f"evaluation loss on {tokens:.0f} held-out tokens: {values}")
    trained = [row.metrics for row in steps if "loss" in row.metrics]
    if trained:
        window = max(len(trained) // 5, 1)
        first, last = (sum(m["loss"] for m in part) / window for part in (trained[:window], trained[-window:]))
        seconds = sum(metrics["seconds"] for metrics in trained)
        lines.append(
            f"training   loss {first:.4f} in the first {window} of {len(trained)} steps, {last:.4f} in the last"
            f" ({seconds / len(trained):.2f} s per step)"
        )
        total, trainable = (sum(m.get(name, 0.0) for m in trained) for name in ("tokens", "trainable_tokens"))
        lines.append(
            f"tokens     {total:.0f}, of which {trainable:.0f} trained; {trained[-1]['epoch']:.2f} epochs,"
            f" {total / seconds:.0f} tokens per second"
        )
    outcomes = ledger.outcome_counts()
    rows = outcomes.pop("trained", 0)
    dropped = ", ".join(f"{reason} {count}" for reason, count in outcomes.items())
    lines.append(f"rows       {rows} trained; dropped: {dropped or 'none'}")
    if errors := ledger.errors():
        lines.append(f"errors     {errors.last}")
    lines.append(f"folder     {path}: run.db, rollouts/, metrics.parquet, checkpoints/, config.toml")
    lines.append(f'next       model.name = "{path}" in a recipe of `keel train`, or: keel serve {path}')
    return "\n".join(lines)
