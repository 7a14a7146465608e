"""``python -m hpu_simulator [options] script.py args...``: run a program on a simulated Gaudi. ``--help`` has the rest.

The program is started as Python would start it, in place of this process, so that nothing of the simulator is in its
arguments, paths, tracebacks or exit status. All it gets is an environment (`settings`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from hpu_simulator import build, rerun, settings

ABOUT = """\
Runs a program for Intel Gaudi on a machine without one: its "hpu" device is simulated, and when it ends a report on
stderr says what it asked of the device. In place of the script: -m module, or the name of a Python program on PATH
(torchrun, deepspeed, accelerate). Processes that the program starts are simulated too.
"""
MORE = """\
In --mode shapes nothing is computed and no memory is used: only sizes are counted. Where the command names the batch
flag, the program is then run again with other batch sizes to find the largest one that fits. With several devices one
rank of as many is rehearsed without the others, whose values are taken to be its own. PT_HPU_LAZY_MODE=1 in
the environment is lazy mode, as on a card. After --install, HPU_SIMULATOR=gaudi2 in the environment does the same as
this command for every Python program of this environment; HPU_SIMULATOR_MODE, _DEVICES, _RANK, _JSON and _HTML are the
other options.
"""
PTH = "hpu_simulator.pth"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"hpu_simulator: {message}; see python -m hpu_simulator --help\n")


def parser() -> Parser:
    """Return the parser of the options; what follows them is the program's."""
    made = Parser(
        prog="python -m hpu_simulator",
        usage="python -m hpu_simulator [options] (script.py | -m module | program on PATH) [its arguments]",
        description=ABOUT,
        epilog=MORE,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--generation", choices=list(settings.GENERATIONS), help="the card (default: gaudi2)")
    made.add_argument("--mode", choices=settings.MODES, help="compute everything (default), or count shapes and sizes")
    made.add_argument("--devices", metavar="N", help="cards that a process sees (default: 1); shapes: ranks of the run")
    made.add_argument("--rank", metavar="N", help="shapes mode with several devices: the rank to rehearse (default: 0)")
    made.add_argument("--json", metavar="FILE", help="write the report as JSON; each rank writes FILE-rank<N>")
    made.add_argument("--html", metavar="FILE", help="write the report as a page with charts")
    made.add_argument(
        "--batch_flag",
        metavar="NAME",
        help=f"the program's batch flag, for the search (default: {rerun.DEFAULT_FLAG}); none: no search",
    )
    made.add_argument("--install", action="store_true", help="let the environment variable alone start the simulator")
    made.add_argument("--uninstall", action="store_true", help="undo --install")
    return made


def split(words: list[str], valued: set[str]) -> tuple[list[str], list[str]]:
    """Return the simulator's options, and the command after them. Options in ``valued`` take the next word."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in valued else 1
    return words[:at], words[at + (words[at : at + 1] == ["--"]) :]


def resolve(command: list[str]) -> list[str]:
    """Return what Python gets to run: a script or folder that is there, a module, or a Python program on PATH.

    Raises:
        FileNotFoundError: the command is none of them; the message is one line.
    """
    name = command[0]
    if name == "-m":
        if len(command) == 1:
            raise FileNotFoundError("-m needs the name of a module")
        return command
    if os.path.exists(name):
        return command
    beside = str(Path(sys.executable).parent)  # of an environment that need not be activated
    found = None if os.sep in name else shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"no file {name!r}" + ("" if os.sep in name else ", and no program of that name on PATH")
        )
    with open(found, "rb") as file:
        head = file.read(200)
    # An interpreter with a long path is started by a shell, from a first line of Python's own.
    if not (head.startswith(b"#!") and (b"python" in head.partition(b"\n")[0] or b"\n'''exec'" in head)):
        raise FileNotFoundError(f"{found} is not a Python program: name the script that it runs")
    return [found, *command[1:]]


def interpreter() -> list[str]:
    """Return this interpreter with the options it was started with (-X, -W, -u, ...)."""
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    at = next((at for at, word in enumerate(words) if word.startswith("-m")), len(words))
    return [sys.executable, *words[:at]]


def install(folder: Path, remove: bool) -> str:
    """Write or remove the one file that puts the bridge on the path where the variable is set. Return what was done.

    Without the variable its one line reads a dictionary and does nothing.
    """
    file = folder / PTH
    if remove:
        there = file.exists()
        file.unlink(missing_ok=True)
        return f"removed {file}" if there else f"not installed: there is no {file}"
    bridge = ascii(str(settings.BRIDGE))
    # site has imported os and sys already.
    line = f"import os, sys; os.environ.get({settings.GENERATION!r}) and sys.path.insert(0, {bridge})\n"
    file.write_text(line, encoding="ascii")
    return f"wrote {file}: {settings.GENERATION}=gaudi2 in the environment now starts the simulator"


def check_device() -> None:
    """Raise `build.CompilerMissingError` if the device is not built yet and cannot be built here."""
    try:
        build.check_compiler()
    except build.CompilerMissingError:
        before = dict(os.environ)
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch is here to tell which built file is looked for
        build.load()
        os.environ.clear()
        os.environ.update(before)


def main(words: list[str]) -> int:
    """Run the command; return its exit status where this process was not replaced by it."""
    options = parser()
    valued = {name for action in options._actions if action.nargs is None for name in action.option_strings}
    own, command = split(words, valued)
    given = options.parse_args(own)
    if given.install or given.uninstall:
        if command or (given.install and given.uninstall):
            options.error("--install and --uninstall stand alone")
        print(install(Path(sysconfig.get_path("purelib")), given.uninstall))
        return 0
    if not command:
        options.error("no script given")
    names = (settings.GENERATION, settings.MODE, settings.DEVICES, settings.RANK, settings.JSON, settings.HTML)
    chosen = (given.generation, given.mode, given.devices, given.rank, given.json, given.html)
    asked = {name: value for name, value in zip(names, chosen, strict=True) if value is not None}
    try:
        command = resolve(command)
        before = {name: os.environ[name] for name in (*names, "RANK", "WORLD_SIZE") if os.environ.get(name)}
        wanted = settings.read({settings.GENERATION: "gaudi2"} | before | asked)
    except (FileNotFoundError, settings.SettingsError) as error:
        options.error(str(error))
    check_device()
    settings.write(wanted)
    command = [*interpreter(), *command]
    if wanted.mode == "shapes" and given.batch_flag != "none":
        return rerun.supervise(command, given.batch_flag, wanted)
    sys.stdout.flush()
    os.execv(command[0], command)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (build.CompilerMissingError, OSError) as error:
        sys.exit(f"hpu_simulator: {error}")
