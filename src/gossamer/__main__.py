"""`python -m gossamer`: the command line without its script."""

from gossamer.cli.main import main

main()
