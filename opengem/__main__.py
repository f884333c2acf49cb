"""`python -m opengem` is the `opengem` command (the form `torchrun -m opengem` needs)."""

from opengem.cli import main

if __name__ == "__main__":
    main()
