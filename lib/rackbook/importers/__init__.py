"""Other tools' result files, read into tidy points."""
