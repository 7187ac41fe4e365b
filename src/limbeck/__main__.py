"""`python -m limbeck`, and so `torchrun … -m limbeck`."""

from limbeck.cli import main

main()
