"""The command line: `omnikv demo`, `omnikv pipeline`. Needs the extra `cli`; the demo also needs the extra `demo`."""
