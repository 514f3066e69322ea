"""The networks, written once on ops."""
