"""The operation set and its dialects."""
