"""Resource errors: what to do where the system has no more open files or disk space for a command."""

from __future__ import annotations

import errno
import resource

FILES = (
    "this process may open {soft} files at once, and it needs more ({error}). Every worker takes some. Allow more, and "
    "start the same command again: ulimit -n {enough}"
)
HARD = " (the hard limit of this user is {hard}: an administrator raises it)"
SYSTEM_FILES = (
    "this machine has reached the number of files that all of its processes may open ({error}). End other programs, or "
    "raise it: sysctl -w fs.file-max=1000000"
)
DISK = "no space is left on the disk ({error}). Make room there, then start the same command again"
ENOUGH_FILES = 4096


def out_of_resources(error: OSError) -> str | None:
    """A sentence on an error for which the system, and no program, is the reason; None for any other error."""
    match error.errno:
        case errno.EMFILE:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            too_low = hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES
            return FILES.format(soft=soft, error=error, enough=ENOUGH_FILES) + (
                HARD.format(hard=hard) if too_low else ""
            )
        case errno.ENFILE:
            return SYSTEM_FILES.format(error=error)
        case errno.ENOSPC | errno.EDQUOT:
            return DISK.format(error=error)
        case _:
            return None
