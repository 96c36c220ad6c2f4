"""Utilities shared by every room; imports nothing of Keel except errors."""
