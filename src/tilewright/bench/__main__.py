"""`python -m tilewright.bench`: `tilewright bench` without the terminal's libraries."""

from tilewright.bench.command import main

if __name__ == "__main__":
    main()
