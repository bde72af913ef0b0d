"""A general plugin of vLLM for the CPU lab: the missing collectives, and a record of the experts that tokens went to.

vLLM loads it in every process, also more than once; everything here may be repeated.
"""

import os

ROUTED_EXPERTS_DIR = "RACKBOOK_ROUTED_EXPERTS_DIR"
"""Variable that names the folder for routed experts; nothing is recorded without it."""


def register() -> None:
    """Add to vLLM what it lacks; called by vLLM."""
    from rackbook_lab_plugin import collectives

    collectives.install()
    if os.environ.get(ROUTED_EXPERTS_DIR):
        from rackbook_lab_plugin import routed_experts

        routed_experts.install()
