"""`python -m abyssal` is `abyssal`."""

from abyssal.cli import main

main()
