"""What the command line does beside running notebooks: one module per room, above all of them.

Each adds its commands to the parser of :mod:`rackbook.cli` and imports what takes time only when one of them runs.
"""
