"""The command line: one file per command, each a thin call into the library. Results on stdout, notes on stderr."""
