"""Environments: the built-in ones, the registry and adapters of other libraries."""
