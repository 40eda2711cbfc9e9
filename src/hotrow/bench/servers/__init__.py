"""Servers: real Redis servers (redis_cluster.py) and librdkafka's mock broker (kafka_mock.py) on loopback.

Benchmarks and tests start them in a `with` block; they end with it, or with this process.
"""
