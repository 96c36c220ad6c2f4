"""Models, checkpoints, references and exports."""
