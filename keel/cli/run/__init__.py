"""Commands that run, serve or export something."""
