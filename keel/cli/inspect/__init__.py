"""Commands that inspect objectives, settings, runs and the machine."""
