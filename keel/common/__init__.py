"""Utilities shared by every package of Keel. Imports nothing from Keel except `keel.errors`."""
