"""Lets this virtual environment import what another one has: `python share_packages.py OTHER`."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main(other: str) -> None:
    own = Path(sysconfig.get_path("purelib"))
    shared = Path(other).resolve() / own.relative_to(sys.prefix)
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
