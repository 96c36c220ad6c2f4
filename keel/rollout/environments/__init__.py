"""Environments: the built-in ones, the registry and integrations of other libraries."""
