"""Exit codes other than 0. The latter two are what a shell reports of a program that SIGINT or SIGPIPE ended."""

BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
