"""Host-side work of an engine step: what the CPU does and what it makes the GPUs wait for."""
