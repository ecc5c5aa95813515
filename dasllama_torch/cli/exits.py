"""Exit codes other than 0. The last two are what a shell reports of a program that SIGINT or SIGPIPE ended."""

OVER_TOLERANCE, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
