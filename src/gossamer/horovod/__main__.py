"""`python -m gossamer.horovod` is the command of command.py."""

from gossamer.horovod.command import main

main()
