"""Updates: publications from a bus into a served version or a remote store, while requests run.

In reading order:
    follower.py        the path of an update: poll → prepare → cut over → acknowledge; and what happens when it fails
    cut_over.py        a publication checked and converted beside what serves, then applied between two batches
    freshness.py       how old the data in answers is, and an alarm when it is too old
    remote_fill.py     fills a remote store from an export
    remote_writer.py   `hotrow publish-remote`: keeps a remote store up to date with a bus

serve/execution and batching import it, and the command line. It imports serve/repository and hotrow.publish.

Threads: each follower has one thread, which polls and applies. Lanes note the age of each answer.
"""
