"""Python processes of the library's own, which load the package that this process has loaded.

``python -m`` and ``python -c`` look into the current directory first: there a folder called ``gear_loader``, or a file
called ``json.py``, would be imported. So this file is run as a script: ``python .../child_process.py serve replay`` is
``python -m gear_loader serve replay``, and ``python .../child_process.py -c PROGRAM`` runs a program.
"""

import sys

__all__ = ["child_command"]

# Before anything else is imported: Python has put this folder on the path, whose files are modules of the package.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import importlib.machinery
import importlib.util
import os
import runpy

_FILE = os.path.abspath(__file__)  # now: it may be relative to a directory that the process leaves


def child_command(*words: str) -> list[str]:
    """The command line of a Python process with this very package, wherever it is started.

    The current directory is not on its path, unless PYTHONPATH names it.

    Args:
        words: of the command line `gear-loader`; or ``"-c"``, a program's source, and the program's arguments.
    """
    return [sys.executable, _FILE, *words]


def _load_package() -> None:
    """Import `gear_loader` from the folder that this file lies in."""
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
