"""Engine directories and the sessions that run networks."""
