"""Runs with the lab's Python and the files of vLLM 0.33.0: what its parsers make of command lines and cases.

Input and output are JSON on standard input and output; nothing of vLLM is started, and no GPU is looked for.
"""

import contextlib
import io
import json
import sys

VALUES = (
    "bench_type", "case", "data_parallel_size", "enable_expert_parallel", "kv_len_jitter", "load_format", "moe_backend",
    "speculative_config",
)  # fmt: skip


def main() -> None:
    asked = json.load(sys.stdin)
    # the bench parsers are only built for a command line that asks for them
    sys.argv = ["vllm", "bench"]
    with contextlib.redirect_stdout(sys.stderr):
        answer = answers(asked)
    json.dump(answer, sys.stdout)


def answers(asked: dict) -> dict:
    import vllm
    from vllm.benchmarks.forward.shapes import parse_case
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.cli.benchmark import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    commands = {}
    for module in (serve, bench):
        for command in module.cmd_init():
            command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
            commands[command.name] = command
    return {
        "version": getattr(vllm, "__version__", None),
        "file": vllm.__file__,
        "commands": [parsed(line, parser, subparsers, commands) for line in asked["commands"]],
        "cases": [case(text, parse_case) for text in asked["cases"]],
    }


def parsed(line: list[str], parser, subparsers, commands) -> dict:
    # another parser is in charge of the words behind "bench"
    inner = subparsers.choices[line[0]]
    if line[0] == "bench":
        (action,) = [a for a in inner._actions if a.dest == "bench_type"]
        inner = action.choices[line[1]]
    known = inner._option_string_actions
    # the parser also takes the start of an option for the option
    unknown = [word for word in line if word.startswith("--") and word.partition("=")[0] not in known]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            arguments = parser.parse_args(line)
            commands[arguments.subparser].validate(arguments)
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1], "unknown": unknown}
    except Exception as problem:
        return {"error": f"{type(problem).__name__}: {problem}", "unknown": unknown}
    return {"values": {name: getattr(arguments, name, None) for name in VALUES}, "unknown": unknown}


def case(text: str, parse_case) -> dict:
    try:
        found = parse_case(text)
    except ValueError as problem:
        return {"error": str(problem)}
    requests = [[r.query_len, r.kv_len, r.num_draft_tokens, r.chunked] for r in found.requests]
    return {"name": found.name, "requests": requests}


if __name__ == "__main__":
    main()
