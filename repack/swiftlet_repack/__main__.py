"""`python -m swiftlet_repack` is the `swiftlet-repack` command."""

from .cli import main

if __name__ == "__main__":
    main()
