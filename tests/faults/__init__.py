"""Faults put into real runs, and what must hold after each: `python -m tests.faults` makes the table of the docs.

Trainers and engine servers are processes, ledgers and records lie on a disk, engines are asked over HTTP. Nothing is
replaced by a double; what is made to fail is the world around the run. A few of each kind run with the tests.
"""
