"""Load models and references; write and read checkpoints and exports."""
