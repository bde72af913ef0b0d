"""What runs inside a rank process: all-reduces of a small vector, timed.

Standard library only, so that any interpreter runs it, also one whose packages are not those of rackbook; torch and
vLLM are imported where they are installed, and only there. Started in one of two ways: by :mod:`..rank_group` on this
machine, or under torchrun or Slurm, one process per rank, as ``python -m rackbook.hostwork.ranks``.
"""
