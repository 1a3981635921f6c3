"""What each real worker checks; run once per rank with the names of the checks as arguments."""

from __future__ import annotations

import sys

from support import ddp_checks, process_group_checks

if __name__ == "__main__":
    checks = {**vars(process_group_checks), **vars(ddp_checks)}
    for name in sys.argv[1:]:
        checks[name]()
        print("passed", name, flush=True)
