"""The shell of a handoff: owns clocks, threads and transports, and asks core what to do."""
