"""Updates: applies publications from a bus to a served version or a remote store, while requests run.

In reading order:
    follower.py        the path of an update: poll → prepare → cut over → acknowledge; and recovery from failures
    cut_over.py        checks and converts a publication while batches run, then applies it between two batches
    freshness.py       measures the age of the data in answers, and raises an alarm when it is too old
    remote_fill.py     fills a remote store from an export
    remote_writer.py   `hotrow publish-remote`: keeps a remote store up to date with a bus

serve/execution and batching import it, and the command line. It imports serve/repository and hotrow.publish.

Threads: each follower has one thread, which polls and applies. Lanes note the age of each answer.
"""
