"""Serving: repository, request joining, buckets, lanes, protocol (docs/decisions/0005-serving.md)."""
