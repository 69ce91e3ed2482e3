"""`python -m swiftlet_bench COMMAND`."""

from .cli import main

if __name__ == "__main__":
    main()
