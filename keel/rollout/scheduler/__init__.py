"""The rollout scheduler: groups, retries, staleness and batches."""
