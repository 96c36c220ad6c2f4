"""Tools around runs: compare, sweep, lens, simulate, launch and doctor."""
