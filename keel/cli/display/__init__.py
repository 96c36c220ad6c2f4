"""Terminal output shared by commands."""
