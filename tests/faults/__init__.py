"""Fault injection into real runs; `python -m tests.faults` prints the table of docs/reliability.md.

Trainers and engine servers are real processes, ledgers and records are on a real disk, engines are reached over HTTP.
Nothing is replaced by a fake; only the environment of the run is made to fail. `test_faults.py` runs a few of each
kind.
"""
