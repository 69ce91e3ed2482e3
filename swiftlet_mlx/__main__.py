"""`python -m swiftlet_mlx` is the `swiftlet-mlx` command."""

from .cli.app import main

if __name__ == "__main__":
    main()
