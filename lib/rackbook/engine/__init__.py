"""The only rooms that know vLLM: they talk to it as a process, over HTTP and through the files that it writes."""
