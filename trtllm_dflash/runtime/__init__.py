"""Requests, caches, scheduling and the draft-verify cycle."""
