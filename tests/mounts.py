"""Whether this process may mount file systems of its own, which tests of full disks need."""

from __future__ import annotations

import os
import shutil
import subprocess


def can_mount() -> bool:
    """Root of a machine, or of a container with the right to do so."""
    unshare = shutil.which("unshare")
    if os.getuid() != 0 or unshare is None:
        return False
    return not subprocess.call([unshare, "-m", "true"], stderr=subprocess.DEVNULL)
