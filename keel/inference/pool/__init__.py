"""Clients for engines behind HTTP and pools of them."""
