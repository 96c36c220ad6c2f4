"""A run on a cluster: its parts as real processes, placed by Ray, watched, and started again by policy."""
