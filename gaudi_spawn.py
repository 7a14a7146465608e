"""Start a training script on several devices: python gaudi_spawn.py --world_size 8 [--use_deepspeed] script.py ..."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # from any working directory

from core.errors import UserError, exit_with_one_line
from core.launcher import DEFAULT_PORT, SAVING, DistributedRunner


class Parser(argparse.ArgumentParser):
    """An error is a `UserError` of one line."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message}; see gaudi_spawn.py --help")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the launcher's flags; ``command`` is the script and all that follows, untouched."""
    parser = Parser("gaudi_spawn.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--world_size", type=int, default=1, help="processes, one per device (default: 1)")
    parser.add_argument("--hostfile", help="several machines: lines 'host slots=N'; with one of the next two")
    parser.add_argument("--use_mpi", action="store_true", help="start the processes by mpirun, bound to cores")
    parser.add_argument(
        "--use_deepspeed",
        action="store_true",
        help="the script trains with --deepspeed; with --hostfile its launcher starts it",
    )
    parser.add_argument("--master_port", type=int, default=DEFAULT_PORT, help="rendezvous port (default: a free one)")
    parser.add_argument(
        "--grace_seconds",
        type=float,
        default=SAVING,
        help="from SIGTERM, or a rank's exit code 75, until ranks that still save are killed (default: %(default)g)",
    )
    whole = {"nargs": argparse.PARSER, "metavar": "training_script"}  # one positional: a second would lose a "--"
    parser.add_argument("command", help="Python file to run on every device, and its arguments as they are", **whole)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Start the script and exit with its first failing rank's exit code."""
    args = vars(parse(argv))
    sys.exit(DistributedRunner([args.pop("command")], **args).run())


if __name__ == "__main__":
    exit_with_one_line(main)
