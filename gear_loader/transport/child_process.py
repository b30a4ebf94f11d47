"""Python child processes that import the same `gear_loader` package as this process.

``python -m`` and ``python -c`` search the current directory first, so a folder ``gear_loader`` or a file ``json.py``
there would be imported. This file is therefore run as a script: ``python .../child_process.py serve replay`` stands for
``python -m gear_loader serve replay``, and ``python .../child_process.py -c PROGRAM`` runs a program.
"""

import sys

# Before other imports: Python has added this folder, whose files are modules of the package, to the path.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import importlib.machinery
import importlib.util
import os
import runpy

_FILE = os.path.abspath(__file__)  # resolved now: it may be relative to a directory that the process leaves


def child_command(*words: str) -> list[str]:
    """Command line of a Python process that imports this package, independent of the current directory.

    The current directory is not on its path, unless PYTHONPATH contains it.

    Args:
        words: arguments of the command `gear-loader`; or ``"-c"``, the source of a program, and its arguments.
    """
    return [sys.executable, _FILE, *words]


def _load_package() -> None:
    """Import `gear_loader` from the folder of this file."""
    folder = os.path.dirname(os.path.dirname(_FILE))
    spec = importlib.machinery.PathFinder.find_spec("gear_loader", [os.path.dirname(folder)])
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["gear_loader"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def _main() -> None:
    _load_package()
    if sys.argv[1:2] == ["-c"]:
        program = sys.argv.pop(2)
        del sys.argv[0]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        return
    runpy.run_module("gear_loader", run_name="__main__")


if __name__ == "__main__":
    _main()
