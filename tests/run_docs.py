"""Run every command shown in a documentation page: `python tests/run_docs.py README.md docs/quickstart.md`.

Commands are the lines that start with `$ ` in ```console blocks. `make demo` and `make test` are left to CI's own steps
(they would be run twice). The first command that fails ends the run with its exit status.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_ELSEWHERE = ("make demo", "make test", "git clone", "cd ")


def commands(page: str) -> list[str]:
    """The commands of a Markdown page, in order; a trailing backslash continues a line."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.S | re.M):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        found += [line[2:].strip() for line in lines if line.startswith("$ ")]
    return found


def main(pages: list[str]) -> int:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for page in pages:
        for command in commands((ROOT / page).read_text()):
            if command.startswith(RUN_ELSEWHERE):
                continue
            print(f"{page}: $ {command}", flush=True)
            status = subprocess.run(command, shell=True, cwd=ROOT, env=os.environ | {"PATH": path}).returncode
            if status:
                print(f"{page}: exit status {status}: {command}", file=sys.stderr)
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
