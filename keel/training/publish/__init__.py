"""Publishing weights to engines."""
