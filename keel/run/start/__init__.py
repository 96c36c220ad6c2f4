"""Starting a run, from the command line and from Python: its settings, its inputs, its folder and its loop."""
