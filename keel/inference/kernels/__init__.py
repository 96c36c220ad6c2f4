"""Native (C) kernels for float32 on CPUs: matrix products, decode attention and prefix-tree attention."""
