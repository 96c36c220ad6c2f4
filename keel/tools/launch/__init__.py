"""Run training on a cluster: engine servers and trainer ranks as processes, placed by Ray, supervised and restarted."""
