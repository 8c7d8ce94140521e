"""`python -m aedfl`: the command line where the `aedfl` script is not installed."""

from .cli import main

if __name__ == "__main__":
    main()
