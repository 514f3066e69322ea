"""Typed configuration and its parsing. Never touches weights."""
