"""Reading checkpoints, weight-name maps, sharding, quantisation and writing checkpoint directories."""
