"""Reproduce, audit and re-measure rack-scale LLM serving results."""

__version__ = "0.1.0"
