"""The in-process engine: continuous batching with shared prompt prefixes."""
