"""A training run: its loop, ledger, records, engine and evaluation."""
