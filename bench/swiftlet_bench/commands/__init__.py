"""The commands of `python -m swiftlet_bench`, one file each: typed functions, thin."""
