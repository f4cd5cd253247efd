"""`python -m abyssal.cli` is `abyssal`."""

from abyssal.cli import main

main()
