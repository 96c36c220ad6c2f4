"""The run: from a task to a better model, by one command or from a loop of one's own. It imports every other room."""
