"""`python -m hotrow`, the same as `hotrow`."""

from hotrow.cli import main

main()
