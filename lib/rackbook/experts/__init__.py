"""The experts of a mixture-of-experts layer: how tokens choose them, and how evenly that loads the ranks."""
