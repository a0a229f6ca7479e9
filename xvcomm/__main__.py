"""`python -m xvcomm` is the `xvcomm` command."""

from xvcomm.cli import main

if __name__ == "__main__":
    main()
