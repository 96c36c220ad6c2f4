"""Keel's objectives inside other trainers.

The modules here are common to all hosts: `requirements` decides which objectives a host can compute exactly,
`conversion` turns a host's tensors into token batches, `step_loss` computes the loss of a micro-batch, `logging`
merges metrics for the host's logger and `recording` writes tokens for `keel compare`. Each host has its own module or
package, which is the only place that imports the host.
"""
