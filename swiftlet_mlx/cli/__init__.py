"""The command line. Human text and progress go to stderr, results to stdout; errors become one plain message."""
