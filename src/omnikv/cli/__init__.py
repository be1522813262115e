"""The command line: `omnikv demo`. Needs the extra `cli`; the demo also needs the extra `demo`."""
