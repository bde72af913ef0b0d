"""The suite: which notebooks there are, running them in batch, what they leave behind, and the report."""
