"""Streams: sources without an end. docs/online.md is the guide.

    follow.py     FollowSource: events to batches, the cursor, and the journal of short batches
    messages.py   the rows in one Kafka or Redis message: JSON or Arrow
    folder.py     feed: a growing folder of Parquet files
    redis.py      feed: a Redis stream
    kafka.py      feed: a Kafka topic

A feed yields messages after a position. Redis and Kafka clients are imported when a feed of that kind is made. A pass
runs on the thread that iterates it; `end` and `idle_seconds` may be called from any thread.
"""
