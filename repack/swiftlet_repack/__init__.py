"""Build, install and verify .qpack containers."""
